// Package tracing lets a client of EpochKV take part in OpenTelemetry traces.
//
//	c, err := client.Dial(endpoint, tracing.With(provider))
//
// Each attempt of a call, and each stream, gets a span of the kind client, under the span of its context, and the server is told of it
// in the field `traceparent` of the request's metadata (W3C Trace Context). The server traces a request if the client's span is sampled:
// its spans say how the time was spent, up to the sync of the device. Pipelines and transactions are streams, and their
// requests are spans of the server under the span of the stream.
//
// Spans have nothing of keys and values. A client without this option has no such spans, and nothing is spent on them.
package tracing

import (
	"context"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/epochkv/epochkv/client"
)

// With makes spans with a provider. To tell the server of spans without making any of its own, give it a provider that makes none,
// such as noop.NewTracerProvider: the server then has the span of the context as its parent.
func With(provider trace.TracerProvider) client.Option {
	t := tracer{provider.Tracer("github.com/epochkv/epochkv/client")}
	return client.WithInterceptors(t.unary, t.stream)
}

type tracer struct{ trace.Tracer }

func (t tracer) unary(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	ctx, span := t.begin(ctx, method)
	err := invoke(ctx, method, request, answer, conn, options...)
	end(span, err)
	return err
}

func (t tracer) stream(
	ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	ctx, span := t.begin(ctx, method)
	s, err := open(ctx, desc, conn, method, slices.Concat(options, []grpc.CallOption{grpc.OnFinish(func(err error) { end(span, err) })})...)
	if err != nil {
		end(span, err) // twice has no effect
	}
	return s, err
}

// begin begins a span, and adds it to the metadata of the request.
func (t tracer) begin(ctx context.Context, method string) (context.Context, trace.Span) {
	name := strings.TrimPrefix(method, "/")
	ctx, span := t.Start(ctx, name, trace.WithSpanKind(trace.SpanKindClient),
		trace.WithAttributes(attribute.String("rpc.system.name", "grpc"), attribute.String("rpc.method", name)))
	fields := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, fields)
	for field, value := range fields {
		ctx = metadata.AppendToOutgoingContext(ctx, field, value)
	}
	return ctx, span
}

// end ends a span. The text of an error may quote a key, so only its code is kept.
func end(span trace.Span, err error) {
	code := status.Code(err)
	span.SetAttributes(attribute.String("rpc.response.status_code", code.String()))
	if code != codes.OK {
		span.SetStatus(otelcodes.Error, "")
	}
	span.End()
}

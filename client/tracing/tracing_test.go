package tracing

import (
	"context"
	"errors"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const method = "/epochkv.v1.KVService/Put"

// recorded is a tracer whose spans are kept, and a context in a span of the caller.
func recorded(t *testing.T) (tracer, *tracetest.SpanRecorder, context.Context, trace.Span) {
	t.Helper()
	spans := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans))
	ctx, parent := provider.Tracer("test").Start(t.Context(), "parent")
	return tracer{provider.Tracer("client")}, spans, ctx, parent
}

// traceparent is what a request tells the server.
func traceparent(ctx context.Context) string {
	out, _ := metadata.FromOutgoingContext(ctx)
	return strings.Join(out.Get("traceparent"), " ")
}

func TestCallsHaveSpansUnderTheirContext(t *testing.T) {
	c, spans, ctx, parent := recorded(t)
	var told string
	failed := status.Error(codes.FailedPrecondition, "the key \"secret\" is there")
	err := c.unary(ctx, method, nil, nil, nil, func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
		told = traceparent(ctx)
		return failed
	})
	if !errors.Is(err, failed) {
		t.Fatalf("%v, want the error of the call", err)
	}
	ended := spans.Ended()
	if len(ended) != 1 {
		t.Fatalf("%d spans, want one", len(ended))
	}
	s := ended[0]
	if s.Name() != "epochkv.v1.KVService/Put" || s.SpanKind() != trace.SpanKindClient || s.Parent().SpanID() != parent.SpanContext().SpanID() {
		t.Errorf("span %q of kind %v under %v", s.Name(), s.SpanKind(), s.Parent())
	}
	if want := "00-" + s.SpanContext().TraceID().String() + "-" + s.SpanContext().SpanID().String() + "-01"; told != want {
		t.Errorf("the server is told %q, want %q", told, want)
	}
	if s.Status().Code != otelcodes.Error || s.Status().Description != "" {
		t.Errorf("status %+v, want an error without a text: it may quote a key", s.Status())
	}
	if got, ok := attributeOf(s, "rpc.response.status_code"); !ok || got != "FailedPrecondition" {
		t.Errorf("code %q", got)
	}
}

func attributeOf(s sdktrace.ReadOnlySpan, name attribute.Key) (string, bool) {
	for _, a := range s.Attributes() {
		if a.Key == name {
			return a.Value.AsString(), true
		}
	}
	return "", false
}

// TestStreamsHaveASpanUntilTheyEnd: opening does not end it, unless it fails.
func TestStreamsHaveASpanUntilTheyEnd(t *testing.T) {
	c, spans, ctx, _ := recorded(t)
	var finish func(error)
	open := func(_ context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, options ...grpc.CallOption) (grpc.ClientStream, error) {
		for _, o := range options {
			if o, ok := o.(grpc.OnFinishCallOption); ok {
				finish = o.OnFinish
			}
		}
		return nil, nil //nolint:nilnil // the tracer does not use the stream
	}
	if _, err := c.stream(ctx, nil, nil, method, open); err != nil || finish == nil {
		t.Fatalf("%v, option for the end: %v", err, finish != nil)
	}
	if n := len(spans.Ended()); n != 0 {
		t.Fatalf("%d spans have ended with the opening", n)
	}
	finish(nil)
	if ended := spans.Ended(); len(ended) != 1 || ended[0].Status().Code != otelcodes.Unset {
		t.Fatalf("%v", ended)
	}
	refused := status.Error(codes.Unavailable, "no")
	_, err := c.stream(ctx, nil, nil, method, func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
		return nil, refused
	})
	if ended := spans.Ended(); !errors.Is(err, refused) || len(ended) != 2 || ended[1].Status().Code != otelcodes.Error {
		t.Fatalf("%v, %v", err, ended)
	}
}

// TestProviderWithoutSpansPassesTheParentOn: the server has the span of the context as its parent.
func TestProviderWithoutSpansPassesTheParentOn(t *testing.T) {
	_, spans, ctx, parent := recorded(t)
	silent, told := tracer{noop.NewTracerProvider().Tracer("")}, ""
	err := silent.unary(ctx, method, nil, nil, nil, func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
		told = traceparent(ctx)
		return nil
	})
	if err != nil || !strings.Contains(told, parent.SpanContext().SpanID().String()) || len(spans.Ended()) != 0 {
		t.Fatalf("%v, told %q, %d spans", err, told, len(spans.Ended()))
	}
}

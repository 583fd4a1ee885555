// Package tracing makes spans of requests that have ended, and sends them to a receiver that speaks OTLP.
//
// Terms. A trace is what one operation of an application causes, on all machines; a span is a part of it, with a beginning, an end and
// the span that caused it. A client names its span in the field `traceparent` of a request's metadata (W3C Trace Context). A
// request is sampled if spans of it are made: if its client's span is, or, without one, by chance.
//
//	request ends ─► sampled? ─► spans with the times that were measured ─► queue ─► one goroutine ─► OTLP
//	                                                                       full: dropped, and counted
//
// Invariants: a request waits for nothing here; the queue and what is being sent are bounded, because spans are counted, and no
// span is larger than spanBytesMax; spans have nothing of keys and values.
//
// The package is the only one of the server that knows OpenTelemetry. It does not know what a request is beside its times.
package tracing

import (
	"context"
	"math"
	"math/rand/v2"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Tracer makes spans and sends them. Its methods may be called from many goroutines.
type Tracer struct {
	ratio atomic.Uint64 // the bits of the share of the requests without a parent that are sampled

	// Constant after Open.
	tracer trace.Tracer
	queue  *queue
}

// Open makes a tracer. It does not wait for the receiver.
func Open(o Options) (*Tracer, error) {
	e, err := o.exporter()
	if err != nil {
		return nil, err
	}
	return newTracer(&o, e), nil
}

func newTracer(o *Options, e sdktrace.SpanExporter) *Tracer {
	t := &Tracer{queue: newQueue(e, o.Failed)}
	t.SetRatio(o.Ratio)
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithSampler(sdktrace.AlwaysSample()), // Samples has decided before
		sdktrace.WithSpanProcessor(t.queue),
		sdktrace.WithResource(o.resource()),
		sdktrace.WithRawSpanLimits(sdktrace.SpanLimits{AttributeValueLengthLimit: textMax, AttributeCountLimit: attributesMax}),
	)
	t.tracer = provider.Tracer("github.com/epochkv/epochkv")
	return t
}

// resource says what sends the spans. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES add to it, and win.
func (o *Options) resource() *resource.Resource {
	own := resource.NewSchemaless(
		attribute.String("service.name", "epochkv"), attribute.String("service.version", o.Version), attribute.String("service.instance.id", o.Instance),
	)
	all, err := resource.Merge(own, resource.Environment())
	if err != nil { // the variables cannot be parsed
		return own
	}
	return all
}

// Close sends what the queue has, until ctx ends. Spans that come later are dropped.
func (t *Tracer) Close(ctx context.Context) error { return t.queue.close(ctx) }

// Stats counts spans; none, if there is no tracer.
func (t *Tracer) Stats() Stats {
	if t == nil {
		return Stats{}
	}
	return t.queue.stats()
}

// TraceID names a trace. The zero value names none.
type TraceID = trace.TraceID

// Parent is the span that has caused a request, as far as the request knows. The zero value says that it knows of none.
type Parent struct {
	span trace.SpanContext
	none bool // decided: the request is not sampled
}

// None is the parent of requests that are not sampled.
var None = Parent{none: true}

// ParseParent parses the field of a request's metadata. A field that is malformed counts as none, as the standard says.
func ParseParent(traceparent string) Parent {
	if traceparent == "" {
		return Parent{}
	}
	ctx := propagation.TraceContext{}.Extract(context.Background(), carrier(traceparent))
	return Parent{span: trace.SpanContextFromContext(ctx)}
}

// TraceID is the trace of the parent.
func (p Parent) TraceID() TraceID { return p.span.TraceID() }

// carrier is metadata that has a traceparent and nothing else.
type carrier string

// Traceparent is the name of the field of a request's metadata.
const Traceparent = "traceparent"

// Get implements propagation.TextMapCarrier.
func (c carrier) Get(name string) string {
	if name == Traceparent {
		return string(c)
	}
	return ""
}

// Set implements propagation.TextMapCarrier. Nothing is injected.
func (carrier) Set(string, string) {}

// Keys implements propagation.TextMapCarrier.
func (carrier) Keys() []string { return []string{Traceparent} }

// Samples decides whether a request is sampled.
func (t *Tracer) Samples(p Parent) bool {
	switch {
	case p.none:
		return false
	case p.span.IsValid():
		return p.span.IsSampled()
	}
	ratio := math.Float64frombits(t.ratio.Load())
	return ratio > 0 && rand.Float64() < ratio
}

// SetRatio changes the share of the requests without a parent that are sampled, from 0 to 1.
func (t *Tracer) SetRatio(ratio float64) { t.ratio.Store(math.Float64bits(ratio)) }

// Stream is the span of a stream that is open. Nil is a stream that is not sampled.
type Stream struct{ span trace.Span }

// Begin begins the span of a stream, if it is sampled. It also returns the parent of the requests in the stream.
func (t *Tracer) Begin(p Parent, method string) (*Stream, Parent) {
	if !t.Samples(p) {
		return nil, None
	}
	_, span := t.tracer.Start(p.context(), method, trace.WithSpanKind(trace.SpanKindServer))
	return &Stream{span: span}, Parent{span: span.SpanContext()}
}

func (p Parent) context() context.Context {
	if !p.span.IsValid() {
		return context.Background()
	}
	return trace.ContextWithSpanContext(context.Background(), p.span)
}

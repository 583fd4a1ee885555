package tracing

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
)

// Request is a request that has ended. Its texts are short, and come from the server.
type Request struct {
	Parent Parent
	Stream *Stream // begun before, by the stream that ends; nil for others

	Method     string // service and name
	Peer       string // address of the client
	Code       string // name of the status code
	Failed     bool   // the code is one that the server answers for
	RequestID  string // empty: none
	Bytes      int    // of its message; 0: not known
	Epoch      uint64 // of its commit; 0: none
	Start, End time.Time

	Work Work // zero: not worth a span
	Sync Sync // zero: no wait
	Waits
}

// Work is the execution of a request, up to its end. It has a span of its own.
type Work struct {
	Name  string
	Start time.Time
}

// Sync is a wait until what a request acknowledges or reveals is durable.
type Sync struct{ Start, End time.Time }

// Waits says for how long a request has waited, besides for durability.
type Waits struct {
	Queue     time.Duration // from its start on, to be executed
	Latch     time.Duration
	Memory    time.Duration
	Pages     time.Duration
	PagesRead uint64
	Client    time.Duration
}

// Bounds of what a span has. The attributes are counted by a test.
const (
	attributesMax = 12
	textMax       = 256 // of an attribute
)

// Request makes the spans of a request that is sampled, and returns its trace:
//
//	client's span ─► request ─┬─► queue
//	                          └─► commit (or read) ─► sync
func (t *Tracer) Request(r *Request) TraceID {
	span := t.begin(r)
	span.SetAttributes(r.attributes()...)
	if r.Failed {
		span.SetStatus(codes.Error, "")
	}
	under := trace.ContextWithSpanContext(context.Background(), span.SpanContext())
	if r.Queue > 0 {
		t.child(under, "queue", r.Start, r.Start.Add(r.Queue))
	}
	if r.Work.Name != "" {
		t.work(under, r)
	}
	span.End(trace.WithTimestamp(r.End))
	return span.SpanContext().TraceID()
}

// begin begins the span of a request, or returns that of the stream that ends.
func (t *Tracer) begin(r *Request) trace.Span {
	if r.Stream != nil {
		return r.Stream.span
	}
	kind := trace.SpanKindServer
	if r.Parent.span.IsValid() && !r.Parent.span.IsRemote() {
		kind = trace.SpanKindInternal // a request of a stream, which has the span of the server
	}
	_, span := t.tracer.Start(r.Parent.context(), r.Method, trace.WithTimestamp(r.Start), trace.WithSpanKind(kind))
	return span
}

// work makes the span of the execution, with its waits. Where they were within it is not known.
func (t *Tracer) work(under context.Context, r *Request) {
	under, span := t.tracer.Start(under, r.Work.Name, trace.WithTimestamp(r.Work.Start))
	for _, w := range []struct {
		name string
		took time.Duration
	}{{"epochkv.wait.latch_us", r.Latch}, {"epochkv.wait.memory_us", r.Memory}, {"epochkv.wait.pages_us", r.Pages}} {
		if w.took > 0 {
			span.SetAttributes(attribute.Int64(w.name, w.took.Microseconds()))
		}
	}
	if r.PagesRead > 0 {
		span.SetAttributes(attribute.Int64("epochkv.pages_read", int64(r.PagesRead)))
	}
	if !r.Sync.Start.IsZero() {
		t.child(under, "sync", r.Sync.Start, r.Sync.End)
	}
	span.End(trace.WithTimestamp(r.End))
}

func (t *Tracer) child(under context.Context, name string, start, end time.Time) {
	_, span := t.tracer.Start(under, name, trace.WithTimestamp(start))
	span.End(trace.WithTimestamp(end))
}

// attributes are those of a request's span: names of OpenTelemetry where it has them.
func (r *Request) attributes() []attribute.KeyValue {
	all := make([]attribute.KeyValue, 0, attributesMax)
	all = append(all, attribute.String("rpc.system.name", "grpc"), attribute.String("rpc.method", r.Method), attribute.String("rpc.response.status_code", r.Code))
	if r.Peer != "" {
		all = append(all, attribute.String("network.peer.address", r.Peer))
	}
	if r.RequestID != "" {
		all = append(all, attribute.String("epochkv.request_id", r.RequestID))
	}
	if r.Bytes > 0 {
		all = append(all, attribute.Int("rpc.request.size", r.Bytes))
	}
	if r.Epoch > 0 {
		all = append(all, attribute.Int64("epochkv.epoch", int64(r.Epoch)))
	}
	if r.Client > 0 {
		all = append(all, attribute.Int64("epochkv.wait.client_us", r.Client.Microseconds()))
	}
	return all
}

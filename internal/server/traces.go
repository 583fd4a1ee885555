package server

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/tracing"
)

// origin is where a request has come from, as its client says. It is looked at when a request ends, and only if something wants
// to know: traces are on, or the request is reported.
type origin struct {
	traceparent string          // of the metadata
	ctx         context.Context // has the metadata instead, if a handler serves the request
	stream      *streamTrace    // of a request in a stream, and of the stream itself; it comes first
}

// streamTrace is a stream with requests of its own. They are children of its span.
type streamTrace struct {
	span        *tracing.Stream // nil if the stream is not sampled
	requests    tracing.Parent
	traceparent string
}

// parent is the span that has caused a request.
func (o *origin) parent() tracing.Parent {
	switch {
	case o.stream != nil:
		return o.stream.requests
	case o.ctx != nil:
		return tracing.ParseParent(traceparentOf(o.ctx))
	}
	return tracing.ParseParent(o.traceparent)
}

// traceID is the client's trace, also if the server makes no span of it.
func (o *origin) traceID() tracing.TraceID {
	if o.stream != nil && o.stream.traceparent != "" {
		return tracing.ParseParent(o.stream.traceparent).TraceID()
	}
	return o.parent().TraceID()
}

// traceparentOf is the field of a request's metadata; empty if it has none, or several.
func traceparentOf(ctx context.Context) string {
	if values := metadata.ValueFromIncomingContext(ctx, tracing.Traceparent); len(values) == 1 {
		return values[0]
	}
	return ""
}

// beginStream is called when a stream begins whose requests end one by one. Nil says that they have no origin.
//
// The requests of a pipeline without a traceparent have nothing to do with each other: each is sampled for itself. Those of
// a stream of transactions belong together, and are sampled with it.
func (s *Server) beginStream(method telemetry.Method, traceparent string) *streamTrace {
	t := s.observer.traces
	if traceparent == "" && (t == nil || method == telemetry.MethodPipeline) {
		return nil
	}
	st := &streamTrace{traceparent: traceparent, requests: tracing.ParseParent(traceparent)}
	if t != nil {
		st.span, st.requests = t.Begin(st.requests, methodPaths[method])
	}
	return st
}

// traceRequest makes the spans of a request that has ended, if it is sampled, and returns its trace.
func (s *Server) traceRequest(conn *connection, e *requestEnd, d *details, now time.Duration) tracing.TraceID {
	t, stream := s.observer.traces, e.ownStream()
	parent := e.origin.parent()
	if stream == nil && !t.Samples(parent) {
		return tracing.TraceID{}
	}
	end := time.Now()
	at := func(d time.Duration) time.Time { return end.Add(d - now) }
	r := tracing.Request{
		Parent: parent, Stream: stream, Method: e.path(), Code: e.code.String(), Failed: isServersFault(e.code), Bytes: e.size, Epoch: e.epoch, Start: at(e.start), End: end,
	}
	if conn != nil {
		r.Peer = conn.peer()
	}
	if d != nil {
		r.Waits = tracing.Waits{
			Queue: d.queue, Latch: d.waits.Latch, Memory: d.waits.Memory, Pages: d.waits.Pages, PagesRead: d.waits.Reads, Client: d.client,
		}
		if d.hasID {
			r.RequestID = uuid.UUID(d.id).String()
		}
	}
	e.work(&r, d, now, at)
	return t.Request(&r)
}

// ownStream is the span of the stream that ends; nil if the request is none, or not sampled.
func (e *requestEnd) ownStream() *tracing.Stream {
	if e.origin.stream == nil || e.operation != "" || !longLived(e.method) {
		return nil
	}
	return e.origin.stream.span
}

// work says when a request was executed, and when it waited for its sync. A read that waited for nothing has no such span.
func (e *requestEnd) work(r *tracing.Request, d *details, now time.Duration, at func(time.Duration) time.Time) {
	from, synced, until := e.times.began, e.times.syncing, e.times.done
	if d != nil {
		if d.executed != 0 {
			synced, until = d.executed, now
		}
		if from == 0 {
			from = e.start + d.queue
		}
	}
	if synced != 0 {
		r.Sync = tracing.Sync{Start: at(synced), End: at(until)}
	}
	writes := e.class() == audit.ClassWrite
	switch {
	case writes && (e.epoch != 0 || synced != 0 || e.times.began != 0):
		r.Work = tracing.Work{Name: "commit", Start: at(max(from, e.start))}
	case synced != 0 || d != nil && d.waits != (mvcc.Waits{}):
		name := "read"
		if writes {
			name = "execute" // and commit nothing
		}
		r.Work = tracing.Work{Name: name, Start: at(max(from, e.start))}
	}
}

// path is the name of the request's span: that of the method on the wire, with the operation of a transaction.
func (e *requestEnd) path() string {
	switch {
	case e.row != nil:
		return e.row.method[1:]
	case e.operation != "":
		return methodPaths[e.method] + "." + e.operation
	}
	return methodPaths[e.method]
}

// methodPaths are the names of methods, with their services.
var methodPaths = func() map[telemetry.Method]string {
	paths := map[telemetry.Method]string{}
	for path, row := range rpcRows {
		if !row.rare {
			paths[row.counts] = path[1:]
		}
	}
	paths[telemetry.MethodCommit] = paths[telemetry.MethodTransact] + ".Commit"
	return paths
}()

// isServersFault reports whether a status is an error of the server, as OpenTelemetry counts them.
func isServersFault(code codes.Code) bool {
	switch code { //nolint:exhaustive // others are errors of clients
	case codes.Unknown, codes.DeadlineExceeded, codes.Unimplemented, codes.Internal, codes.Unavailable, codes.DataLoss:
		return true
	}
	return false
}

// traceFlushTimeout bounds how long the end of the server waits for the receiver of traces.
const traceFlushTimeout = 2 * time.Second

const _ = uint(config.TraceMemory - tracing.MemoryMax) // what the bound of resident memory has for it is enough

func (s *Server) openTraces(c *config.Traces) (err error) {
	if !c.Enabled() {
		return nil
	}
	s.observer.traces, err = tracing.Open(tracing.Options{
		Endpoint: c.Endpoint, Ratio: c.Ratio, TLSFiles: tracing.TLSFiles{CA: c.CA, Cert: c.Cert, Key: c.Key},
		Version: telemetry.Build().Version, Instance: uuid.NewString(), Failed: s.traceLost,
	})
	if err != nil {
		return fmt.Errorf("--trace-endpoint %s: %w", c.Endpoint, err)
	}
	return nil
}

// traceLost reports spans that the receiver did not take.
func (s *Server) traceLost(err error) {
	s.log.incident(slog.LevelWarn, "traces", "spans of traces could not be sent and are lost", err, "endpoint", s.config.Traces.Endpoint)
}

// closeTraces sends what is left. A receiver that does not answer is no error of the server.
func (s *Server) closeTraces() {
	if s.observer.traces == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), traceFlushTimeout)
	defer cancel()
	if err := s.observer.traces.Close(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		s.traceLost(err)
	}
}

package server

import (
	"context"
	"log/slog"
	"math"
	"path"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/tracing"
)

// details are what a request has collected besides its answer. They are part of the answer that waits, so that no
// request takes memory of its own for them. Most requests wait for nothing and collect nothing.
type details struct {
	waits    mvcc.Waits
	queue    time.Duration // waited for a goroutine that executes it
	client   time.Duration // waited for the client to take a part of the answer
	sync     time.Duration // waited until what a part of the answer reveals was durable
	executed time.Duration // when the whole answer began to wait for that, by the server's clock; 0: it did not

	note *auditNote // of the audit log; nil if it wants none
	noted
}

// noted is what an executor has noted of the request at hand.
type noted struct {
	any   bool // there is something
	hasID bool
	id    mvcc.RequestID
	key   keyPrefix
}

// keyPrefix is the beginning of the first key that a request names.
type keyPrefix struct {
	length uint8
	bytes  [config.SlowKeyBytesMax]byte
}

func (k *keyPrefix) String() string { return string(k.bytes[:k.length]) }

// takeDetails adds what the executor has collected of the request at hand to d.
func (c *executor) takeDetails(d *details) {
	c.session.TakeWaits(&d.waits)
	if c.noted.any {
		d.noted, c.noted = c.noted, noted{}
	}
}

// collected reports whether there is anything in the details.
func (d *details) collected() bool { return d.any || d.waits != (mvcc.Waits{}) }

// named notes the first key of a request, if the configuration allows it.
func (c *executor) named(key []byte) {
	if c.keyBytes > 0 {
		c.noted.key.length = uint8(copy(c.noted.key.bytes[:c.keyBytes], key))
		c.noted.any = true
	}
}

// requestEnd is a request that has ended.
type requestEnd struct {
	method    telemetry.Method
	operation string  // of a transaction stream, besides its commit; such a request is not counted
	row       *rpcRow // of a method that the metrics do not have; nil for others
	code      codes.Code
	start     time.Duration
	size      int    // of the request's message; 0: unknown
	epoch     uint64 // of the commit; 0: none, or not known
	origin    origin
	trace     tracing.TraceID // if the server traces it
	times     commitTimes     // of streams
}

// commitTimes say when a stream has committed, by the server's clock. Zero: it is not known, or there was none.
type commitTimes struct {
	began         time.Duration
	syncing, done time.Duration // when the wait for the sync began and ended
}

// traceID is the trace that the request is a part of; zero if there is none.
func (e *requestEnd) traceID() tracing.TraceID {
	if e.trace.IsValid() {
		return e.trace
	}
	return e.origin.traceID()
}

// observer sees every request at its end.
type observer struct {
	requests telemetry.Requests
	from     atomic.Int64 // requests that take as long are reported, a time.Duration; 0, or the longest one: none are
	slow     slowRequests
	audit    auditing
	traces   *tracing.Tracer // nil: requests are not traced
	debug    atomic.Bool     // a line in the log for each request
}

func (o *observer) init(s *config.SlowRequests) {
	o.slow.init(s)
	o.reportFrom(s.Threshold)
}

// reportFrom changes from which duration on requests are reported; 0 is none.
func (o *observer) reportFrom(threshold time.Duration) {
	if threshold == 0 {
		threshold = math.MaxInt64
	}
	o.from.Store(int64(threshold))
}

// ended is called once for each request, at its end. It counts the request, and reports it if something wants to
// know of it. It reads the clock once, for the count of durations. The details may be nil; they are a parameter of
// their own so that they need not be in the heap.
func (s *Server) ended(conn *connection, e *requestEnd, d *details) {
	now := s.clock.now()
	took := now - e.start
	if conn != nil && e.operation == "" && e.row == nil {
		conn.shard.Observe(e.method, e.code, took)
	}
	if s.observer.traces != nil {
		e.trace = s.traceRequest(conn, e, d, now)
	}
	if from := time.Duration(s.observer.from.Load()); from > 0 && took >= from && !waitsForClient(e) {
		s.reportSlow(conn, e, d, now)
	}
	if s.observer.audit.log != nil {
		s.writeAudit(conn, e, d, now)
	}
	if s.observer.debug.Load() {
		s.logRequest(conn, e, d, now)
	}
}

// logRequest logs a request: its outcome, and nothing of keys and values.
func (s *Server) logRequest(conn *connection, e *requestEnd, d *details, now time.Duration) {
	line := slowRequest{took: now - e.start, method: e.method, operation: e.operation, row: e.row, code: e.code, trace: e.traceID()}
	if conn != nil {
		line.peer = conn.peer()
	}
	if d != nil {
		line.details = *d
	}
	s.log.LogAttrs(context.Background(), slog.LevelDebug, "request", line.attributes(0)...)
}

// name is the method, with the operation of a transaction.
func (e *requestEnd) name() string { return requestName(e.method, e.operation, e.row) }

// requestBase is the name of a method without its service.
func requestBase(method string) string { return path.Base(method) }

func requestName(method telemetry.Method, operation string, row *rpcRow) string {
	switch {
	case row != nil:
		return requestBase(row.method)
	case operation != "":
		return method.String() + "." + operation
	}
	return method.String()
}

// waitsForClient reports whether the client decides how long the request takes.
func waitsForClient(e *requestEnd) bool {
	return e.operation == "" && (longLived(e.method) || e.method == telemetry.MethodObserveLock || e.method == telemetry.MethodAcquireLock)
}

package tracing

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	sdktrace "go.opentelemetry.io/otel/sdk/trace"
)

// Bounds of the queue. The largest span is one of a request with all attributes; a test fills the queue with such spans, and
// compares its memory with MemoryMax.
const (
	queueSpansMax = 4096 // a second of a thousand sampled writes
	batchSpansMax = 512  // that are sent at once
	spanBytesMax  = 3 << 10

	// MemoryMax is what a tracer takes at most: the queue, and a batch with its encoding, which may be kept for a retry.
	MemoryMax = (queueSpansMax + 3*batchSpansMax) * spanBytesMax
)

const (
	batchEvery    = time.Second      // spans wait for others for so long at most
	exportTimeout = 10 * time.Second // of one batch, with what is repeated of it
	retryFirst    = time.Second      // before it is sent for the second time; then twice as long
)

// Stats counts spans.
type Stats struct {
	Sent    uint64
	Dropped uint64 // because the queue was full, or closed
	Failed  uint64 // which the receiver did not take
	Queued  int
}

// queue keeps spans until they are sent. It implements sdktrace.SpanProcessor.
type queue struct {
	// Constant.
	exporter sdktrace.SpanExporter
	failed   func(error)
	wake     chan struct{} // has a token when there is a batch
	closing  chan struct{} // closed by close
	cancel   context.CancelFunc
	ended    chan struct{} // closed when the goroutine has ended

	sent, dropped, lost atomic.Uint64

	mu     sync.Mutex // a leaf
	spans  []sdktrace.ReadOnlySpan
	closed bool
}

func newQueue(e sdktrace.SpanExporter, failed func(error)) *queue {
	ctx, cancel := context.WithCancel(context.Background())
	q := &queue{
		exporter: e, failed: failed, wake: make(chan struct{}, 1), closing: make(chan struct{}), cancel: cancel, ended: make(chan struct{}),
	}
	go q.run(ctx)
	return q
}

// OnStart implements sdktrace.SpanProcessor.
func (*queue) OnStart(context.Context, sdktrace.ReadWriteSpan) {}

// OnEnd implements sdktrace.SpanProcessor. It waits for nothing.
func (q *queue) OnEnd(s sdktrace.ReadOnlySpan) {
	q.mu.Lock()
	full := q.closed || len(q.spans) >= queueSpansMax
	if !full {
		q.spans = append(q.spans, s)
	}
	batch := len(q.spans) == batchSpansMax
	q.mu.Unlock()
	if full {
		q.dropped.Add(1)
	}
	if batch {
		select {
		case q.wake <- struct{}{}:
		default: // the token of an earlier batch is still there
		}
	}
}

// Shutdown implements sdktrace.SpanProcessor. Tracer.Close closes the queue.
func (*queue) Shutdown(context.Context) error { return nil }

// ForceFlush implements sdktrace.SpanProcessor.
func (*queue) ForceFlush(context.Context) error { return nil }

// run sends batches until close is called, and then what is left. ctx ends what is being sent.
func (q *queue) run(ctx context.Context) {
	defer close(q.ended)
	ticker := time.NewTicker(batchEvery)
	defer ticker.Stop()
	for closing := false; !closing; {
		select {
		case <-q.closing:
			closing = true
		case <-q.wake:
		case <-ticker.C:
		}
		for batch := q.take(); len(batch) > 0; batch = q.take() {
			if q.send(ctx, batch) != nil && q.isClosed() {
				break // the server does not wait for a receiver that takes nothing
			}
		}
	}
	q.dropped.Add(uint64(q.drop()))
}

// take takes the oldest spans of the queue.
func (q *queue) take() []sdktrace.ReadOnlySpan {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(len(q.spans), batchSpansMax)
	batch := make([]sdktrace.ReadOnlySpan, n)
	copy(batch, q.spans)
	rest := copy(q.spans, q.spans[n:])
	clear(q.spans[rest:])
	q.spans = q.spans[:rest]
	return batch
}

// drop removes all spans, and returns how many there were.
func (q *queue) drop() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(q.spans)
	q.spans = nil
	return n
}

func (q *queue) isClosed() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.closed
}

// send sends a batch, again if the receiver could not take it for the moment, or gives it up.
func (q *queue) send(ctx context.Context, batch []sdktrace.ReadOnlySpan) error {
	ctx, cancel := context.WithTimeout(ctx, exportTimeout)
	defer cancel()
	err := q.exporter.ExportSpans(ctx, batch)
	for pause := retryFirst; errors.As(err, new(*temporaryError)) && q.pause(ctx, pause); pause *= 2 {
		err = q.exporter.ExportSpans(ctx, batch)
	}
	if err == nil {
		q.sent.Add(uint64(len(batch)))
		return nil
	}
	lost := len(batch)
	if r, ok := errors.AsType[*rejectedError](err); ok {
		lost = min(r.count, lost)
	}
	q.lost.Add(uint64(lost))
	q.sent.Add(uint64(len(batch) - lost))
	q.failed(err)
	return err
}

// pause waits before a batch is sent again. It reports false if it must not be: it is too late, or the queue is being closed.
func (q *queue) pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
	case <-q.closing:
	}
	return false
}

// close sends what is left, until ctx ends or the receiver does not take a batch, and drops the rest. It is called once.
func (q *queue) close(ctx context.Context) error {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	close(q.closing)
	stop := context.AfterFunc(ctx, q.cancel)
	<-q.ended
	stop()
	q.cancel()
	return q.exporter.Shutdown(ctx)
}

func (q *queue) stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	return Stats{Sent: q.sent.Load(), Dropped: q.dropped.Load(), Failed: q.lost.Load(), Queued: len(q.spans)}
}

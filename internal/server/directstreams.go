package server

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// directStream is a stream of messages that the direct transport executes: a pipeline, or a stream of
// keep-alives.
type directStream interface {
	transport.Messages

	// observe is called once, by what has removed the stream from directStreams. It may be called while
	// the connection's mutex is held.
	observe(code codes.Code)

	// drain ends the stream, at once or when its answers are sent.
	drain()

	// trim is called now and then, for a stream to give back what it keeps if it is idle.
	trim()
}

// directStreams are the open streams of messages of the direct transport.
type directStreams struct {
	mu       sync.Mutex // a leaf
	all      map[transport.Request]directStream
	draining bool // no more are added
}

// Messages implements transport.Client.
func (c *directClient) Messages(r transport.Request) (transport.Messages, error) {
	method := directMethods[r.Method()-1]
	var open func(transport.Request, *auth.Limiter) directStream
	var row *rpcRow
	switch method {
	case telemetry.MethodPipeline:
		open, row = c.openPipeline, pipelineRow
	case telemetry.MethodKeepAlive:
		open, row = c.openKeepAlives, keepAliveRow
	default:
		return nil, nil //nolint:nilnil // as the interface says
	}
	if c.server.connections.refuses(c.connection) {
		return nil, errTooManyConns
	}
	limiter, user, err := c.countOfUser(r, row)
	if err != nil {
		end := &requestEnd{method: method, code: statusOf(err).Code(), start: c.server.clock.now()}
		c.server.ended(c.connection, end, &details{note: &auditNote{user: user, denied: isDenial(err)}})
		return nil, err
	}
	s := open(r, limiter)
	if !c.server.direct.streams.add(r, s) {
		limiter.Close(auth.Streams)
		return nil, errShuttingDown
	}
	c.server.counters.streams.Add(1)
	return s, nil
}

// countOfUser counts a stream among those that its user has open, until its observe gives it back to the limiter, which is nil
// for a user without limits. The check before a message is that of serveGated.
func (c *directClient) countOfUser(r transport.Request, row *rpcRow) (l *auth.Limiter, user string, err error) {
	if c.server.gate.table.Load() == nil {
		return nil, "", nil // a nil limiter has no limits
	}
	a := access{gate: &c.server.gate, conn: c.connection, header: r.Authorization()}
	err = a.check(row, nil)
	if user = a.userName(); err != nil {
		return nil, user, err
	}
	l = a.limiter()
	return l, user, l.Open(auth.Streams)
}

// add reports false if the server drains.
func (q *directStreams) add(r transport.Request, s directStream) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.draining {
		return false
	}
	if q.all == nil {
		q.all = map[transport.Request]directStream{}
	}
	q.all[r] = s
	return true
}

// take removes a stream; nil if the request is none, or was removed before.
func (q *directStreams) take(r transport.Request) directStream {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := q.all[r]
	delete(q.all, r)
	return s
}

// drain ends all streams, and lets no more begin.
func (q *directStreams) drain() {
	q.mu.Lock()
	q.draining = true
	all := slices.Collect(maps.Values(q.all))
	q.mu.Unlock()
	for _, s := range all {
		s.drain()
	}
}

// trimEvery is how often streams are trimmed. Tests change it.
var trimEvery = time.Second

// trimAll trims the streams now and then, until ctx ends: thousands of them may be idle, each with buffers of its largest messages.
func (q *directStreams) trimAll(ctx context.Context) {
	ticker := time.NewTicker(trimEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		q.mu.Lock()
		all := slices.Collect(maps.Values(q.all))
		q.mu.Unlock()
		for _, s := range all {
			s.trim()
		}
	}
}

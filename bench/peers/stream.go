package peers

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// tag is what the load generator remembers of a request in a stream.
type tag struct {
	record int
	least  uint64 // version that was acknowledged when the request was made
	began  time.Time
	timed  bool
}

// stream is a load that keeps requests in flight on one connection. Clients call it from one goroutine or from many.
type stream struct {
	*caller
	put   bool
	phase *atomic.Int32

	mu sync.Mutex // over the caller
}

// streamed keeps depth requests in flight for a while.
func streamed(ctx context.Context, c *caller, depth int, put bool, window time.Duration, timed timer) error {
	run := func(ctx context.Context, phase *atomic.Int32) error {
		s := &stream{caller: c, put: put, phase: phase}
		return c.store.stream(ctx, depth, s.next, s.settle)
	}
	return timeline(ctx, window, timed, run, func() int { return int(c.done.Load()) })
}

// next makes the next request, unless the time is up.
func (s *stream) next(r *request) bool {
	now := s.phase.Load()
	if now == over {
		return false
	}
	s.mu.Lock()
	i := s.any()
	s.mu.Unlock()
	r.key, r.value = s.records.key(i), nil
	if s.put {
		r.value = value(i, s.version)
	}
	r.tag = tag{record: i, least: s.records.versions[i].Load(), began: time.Now(), timed: now == timing}
	return true
}

// The answer to a request is checked and counted.
func (s *stream) settle(r *request, got []byte) error {
	if s.put {
		s.records.versions[r.tag.record].Store(s.version)
	} else if _, err := s.look(r.tag.record, got, r.tag.least); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.put {
		s.committed(r.tag.record)
	}
	if r.tag.timed {
		s.latencies = append(s.latencies, time.Since(r.tag.began))
	}
	if s.phase.Load() == timing {
		s.done.Add(1)
	}
	return nil
}

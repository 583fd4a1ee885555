package cache

import (
	"context"
	"sync"
)

const (
	// requestMax is the number of requests that may wait. A reader that is ahead of the device gains
	// nothing from older requests.
	requestMax = 8
	// prefetchWindow is the number of pages that are read in one submission, so that the read of a
	// reader never waits for a long queue.
	prefetchWindow = 32
)

// Guard lets a prefetcher work, window by window.
type Guard interface {
	// Enter protects the pages of a state from being freed until Leave, as a reader's slot does,
	// and reports whether the prefetcher may read now. It may not if the state has been replaced
	// since the pages were requested: they may have been freed, and bytes that are read under their
	// ids would be cached after the ids were invalidated. It may not either while a checkpoint or
	// the log needs the device.
	Enter(state uint64) bool
	// Leave ends the protection that a successful Enter began.
	Leave()
}

// Prefetcher reads pages in the background before readers need them. All its requests are advice.
// It drops the oldest request when the queue is full. It stops in the middle of a request while its
// guard refuses. And it stops when half of the frames that are not hot hold prefetched pages
// without a visit: more of them would evict its own pages before their reader comes.
type Prefetcher struct {
	cache *Cache
	guard Guard // constant
	wake  chan struct{}

	mu       sync.Mutex // guards requests and dropped; no other lock is taken inside it
	requests []request  // oldest first, at most requestMax
	dropped  uint64
}

type request struct {
	ids   []ID
	hint  Hint
	state uint64
}

// NewPrefetcher makes a prefetcher that works while Run runs.
func NewPrefetcher(c *Cache, guard Guard) *Prefetcher {
	return &Prefetcher{cache: c, guard: guard, wake: make(chan struct{}, 1)}
}

// Request requests that pages of a state are prefetched, in order. It copies ids and never blocks.
func (p *Prefetcher) Request(state uint64, ids []ID, h Hint) {
	p.mu.Lock()
	var reuse []ID
	if len(p.requests) == requestMax {
		p.dropped += uint64(len(p.requests[0].ids))
		reuse = p.requests[0].ids[:0]
		p.requests = append(p.requests[:0], p.requests[1:]...)
	}
	p.requests = append(p.requests, request{append(reuse, ids...), h, state})
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Dropped is the number of pages that were requested and then not read, because the queue was full,
// the guard refused or the cache had no room.
func (p *Prefetcher) Dropped() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dropped
}

// Run reads the requested pages until ctx ends.
func (p *Prefetcher) Run(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		}
		for a, ok := p.take(); ok && ctx.Err() == nil; a, ok = p.take() {
			p.fetch(ctx, a)
		}
	}
}

func (p *Prefetcher) take() (a request, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.requests) == 0 {
		return a, false
	}
	a = p.requests[0]
	p.requests = append(p.requests[:0], p.requests[1:]...)
	return a, true
}

// fetch reads the pages of one request, window by window. When the guard refuses, the rest is
// dropped: by the time the guard allows reading again, the reader has read the pages itself.
func (p *Prefetcher) fetch(ctx context.Context, a request) {
	for rest := a.ids; len(rest) > 0; {
		if ctx.Err() != nil || !p.guard.Enter(a.state) {
			p.drop(len(rest))
			return
		}
		n := min(len(rest), prefetchWindow)
		room := p.cache.Prefetch(rest[:n], a.hint)
		p.guard.Leave()
		if !room {
			p.drop(len(rest))
			return
		}
		rest = rest[n:]
	}
}

func (p *Prefetcher) drop(pages int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropped += uint64(pages)
}

// Prefetch reads those pages that are neither in memory nor being read, in one submission. They
// are cached as not visited. It reports false when there is no room for more. An error is ignored:
// the reader gets it when it reads the page. The caller is inside its slot's guard.
func (c *Cache) Prefetch(ids []ID, h Hint) (room bool) {
	b := batches.Get().(*batch)
	defer b.free()
	room = c.startPrefetch(b, ids, h)
	c.readAll(b)
	_ = c.finishAll(b, nil)
	return room
}

func (c *Cache) startPrefetch(b *batch, ids []ID, h Hint) (room bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.clock.counts()
	waiting := c.counters.prefetched - n.used - n.wasted
	t := c.table.Load()
	for i, id := range ids {
		if _, ok := t.lookup(id); ok || c.flights[id] != nil {
			continue
		}
		if 2*(waiting+uint64(len(b.flights))) >= uint64(c.count)-n.hot {
			return false
		}
		fl := c.startLocked(id, h, false)
		if fl == nil {
			return false
		}
		fl.prefetched = true
		b.add(fl, i)
	}
	return true
}

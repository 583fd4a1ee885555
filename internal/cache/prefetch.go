package cache

import (
	"context"
	"sync"
)

const (
	// askMax is how many batches may wait. A reader that is ahead of the device gains nothing from older ones.
	askMax = 8
	// prefetchWindow is how many pages are read in one submission, so that a demand read never waits behind a long queue.
	prefetchWindow = 32
)

// Guard lets a prefetcher work, window by window.
type Guard interface {
	// Enter protects the pages of a state from being freed until Leave, as a reader's slot does, and reports whether it may read
	// now: not if the state has been replaced since the pages were asked for (they may have been freed, and what is read under
	// their ids be cached after it was forgotten), nor while a checkpoint or the log needs the device.
	Enter(state uint64) bool
	// Leave ends what a successful Enter began.
	Leave()
}

// Prefetcher reads pages ahead of those who will want them, in the background. Everything it does is advice: it drops its oldest
// work when it falls behind, stops where it is while others are busy, and when what it has read waits unvisited in half of what is not HOT:
// more would push out its own pages before their reader comes.
type Prefetcher struct {
	cache *Cache
	guard Guard // constant
	wake  chan struct{}

	mu      sync.Mutex // guards asks and dropped; a leaf lock
	asks    []ask      // oldest first, at most askMax
	dropped uint64
}

type ask struct {
	ids   []ID
	hint  Hint
	state uint64
}

// NewPrefetcher makes a prefetcher that works while Run runs.
func NewPrefetcher(c *Cache, guard Guard) *Prefetcher {
	return &Prefetcher{cache: c, guard: guard, wake: make(chan struct{}, 1)}
}

// Ask queues pages of a state to be read ahead, in order. It copies ids and never blocks.
func (p *Prefetcher) Ask(state uint64, ids []ID, h Hint) {
	p.mu.Lock()
	var reuse []ID
	if len(p.asks) == askMax {
		p.dropped += uint64(len(p.asks[0].ids))
		reuse = p.asks[0].ids[:0]
		p.asks = append(p.asks[:0], p.asks[1:]...)
	}
	p.asks = append(p.asks, ask{append(reuse, ids...), h, state})
	p.mu.Unlock()
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Dropped is how many pages were asked for and then not read, because the queue was full or others were busy.
func (p *Prefetcher) Dropped() uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dropped
}

// Run reads what is asked for until ctx ends.
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

func (p *Prefetcher) take() (a ask, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.asks) == 0 {
		return a, false
	}
	a = p.asks[0]
	p.asks = append(p.asks[:0], p.asks[1:]...)
	return a, true
}

// fetch reads one ask, window by window. Once others are busy, the rest is dropped: by the time they are not, the reader has
// read it itself.
func (p *Prefetcher) fetch(ctx context.Context, a ask) {
	for rest := a.ids; len(rest) > 0; {
		if ctx.Err() != nil || !p.guard.Enter(a.state) {
			p.drop(len(rest))
			return
		}
		n := min(len(rest), prefetchWindow)
		room := p.cache.ReadAhead(rest[:n], a.hint)
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

// ReadAhead loads those pages that are neither in memory nor on their way, in one submission. They arrive unvisited. It reports false once
// there is no room for more. An error is left for the reader to find. The caller is inside its slot's protection.
func (c *Cache) ReadAhead(ids []ID, h Hint) (room bool) {
	b := batches.Get().(*batch)
	defer b.free()
	room = c.departAhead(b, ids, h)
	c.loadAll(b)
	_ = c.landAll(b, nil)
	return room
}

func (c *Cache) departAhead(b *batch, ids []ID, h Hint) (room bool) {
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
		fl := c.departLocked(id, h, false)
		if fl == nil {
			return false
		}
		fl.ahead = true
		b.add(fl, i)
	}
	return true
}

package storage

import (
	"context"

	"epochkv/internal/cache"
	"epochkv/internal/pin"
	"epochkv/internal/storage/btree"
	"epochkv/internal/storage/page"
)

const (
	// siblingsMin is how many leaves a bounded scan must have before it for reading ahead to pay.
	siblingsMin = 8
	// siblingsMax is how far a scan reads ahead: one submission.
	siblingsMax = 32
)

// prefetch reads leaves ahead of bounded scans: when a cursor has stepped into a leaf, its parent's separators tell which
// siblings lie inside the scan's bound. There is none on seeks, on point reads, for unbounded scans, or while the next sibling is in
// memory, which also says that the last window has not been used up.
type prefetch struct {
	engine *Engine
	ahead  *cache.Prefetcher
	slot   *pin.Slot // the prefetcher's goroutine
}

func newPrefetch(e *Engine) *prefetch {
	p := &prefetch{engine: e, slot: e.registry.Slot()}
	p.ahead = cache.NewPrefetcher(e.pages.cache, p)
	return p
}

// Enter implements cache.Guard. The state is the checkpoint number of the view that the scan reads.
func (p *prefetch) Enter(state uint64) bool {
	if p.engine.merging.Load() {
		return false
	}
	p.slot.Enter()
	if p.engine.view.Load().checkpoint != state {
		p.slot.Leave()
		return false
	}
	return true
}

// Leave implements cache.Guard.
func (p *prefetch) Leave() { p.slot.Leave() }

// entered is called by a cursor's tree when it has stepped into another leaf.
func (c *Cursor) entered(t *btree.Cursor, forward bool) {
	if !t.Bounded(forward) {
		return
	}
	var ids [siblingsMax]page.ID
	n := t.Siblings(ids[:], forward)
	if n < siblingsMin || c.engine.pages.cache.Contains(cache.ID(ids[0])) {
		return
	}
	var ask [siblingsMax]cache.ID
	for i, id := range ids[:n] {
		ask[i] = cache.ID(id)
	}
	c.engine.prefetch.ahead.Ask(c.checkpoint, ask[:n], cache.Default)
}

// RunPrefetch reads ahead for scans until ctx ends.
func (e *Engine) RunPrefetch(ctx context.Context) {
	if e.prefetch != nil {
		e.prefetch.ahead.Run(ctx)
	}
}

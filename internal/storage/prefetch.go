package storage

import (
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

const (
	// siblingsMin is how many leaves a bounded scan must have before it for reading in the background to pay.
	siblingsMin = 8
	// siblingsMax is how far a scan reads ahead: one submission.
	siblingsMax = 32
	// readaheadMin is how many leaves a scan without a limit reads at once at first; each time it has used them up, twice as many.
	readaheadMin = 2
)

// prefetch reads leaves ahead of bounded scans, in the background.
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

// RunPrefetch reads ahead for scans until ctx ends.
func (e *Engine) RunPrefetch(ctx context.Context) {
	if e.prefetch != nil {
		e.prefetch.ahead.Run(ctx)
	}
}

// stretch is how far one scan reads ahead by itself.
type readahead struct {
	next   int // leaves that it still has to visit, as far as its limit tells; 0: nobody knows
	length int // leaves to read at the next miss, when nobody knows
}

// beforeLeaf is called when the tree's cursor is about to enter a leaf. If the leaf is in memory, nothing is read: the last stretch has not been
// used up. If it is not, the scan must wait for the device in any case, and what it will want next is read in the same breath:
//
//	the limit tells how many leaves    those, even on the seek: neighbours in one request cost little more than one page
//	a bound with siblings enough       this one; the others meanwhile in the background, window by window
//	a nearer bound                     what lies inside it
//	neither                            at the first step that misses 2 leaves, then 4, 8 ... siblingsMax
//
// While a checkpoint is at work, which the background yields to, a far bound is none.
//
// A seek without a limit reads one leaf, as a point read does.
func (c *Cursor) beforeLeaf(t *btree.Cursor, id page.ID, forward, seek bool) {
	if c.leaves++; c.engine.prefetch == nil {
		return
	}
	wanted := c.readahead.next
	if wanted > 0 {
		c.readahead.next--
	}
	if c.engine.pages.cache.Contains(cache.ID(id)) || seek && wanted < 2 {
		return
	}
	var near [siblingsMax + 1]page.ID
	n := t.Ahead(near[:], forward)
	var ids [siblingsMax + 1]cache.ID
	for i, id := range near[:n] {
		ids[i] = cache.ID(id)
	}
	switch bounded, far := t.Bounded(forward), n > siblingsMin; {
	case wanted > 0:
		n = min(n, wanted)
	case bounded && far && !c.engine.merging.Load():
		c.engine.prefetch.ahead.Ask(c.checkpoint, ids[1:n], cache.Default)
		return
	case !bounded || far:
		n = min(n, c.readahead.length)
		c.readahead.length = min(2*c.readahead.length, siblingsMax)
	}
	if n = min(n, siblingsMax); n > 1 {
		slices.Sort(ids[:n]) // neighbours in the file become one request
		c.engine.pages.cache.ReadAhead(ids[:n], cache.Low)
	}
}

// leavesOf is about how many leaves so many entries in a row touch, 0 for an unknown number. The first one begins anywhere in a leaf; a last
// leaf counts if it is more likely needed than not.
func (e *Engine) leavesOf(entries int) int {
	if entries == 0 {
		return 0
	}
	state, space, r := e.pager.State(), e.pager.Stats(), e.blobs.Stats()
	leaves := space.Live - min(space.Live, r.BlobPages+r.OverflowPages+r.TablePages+space.MapPages)
	if state.Entries == 0 || leaves == 0 {
		return 0
	}
	return 1 + int((uint64(min(entries, entriesMax)-1)*leaves+state.Entries/2)/state.Entries)
}

// entriesMax keeps the arithmetic of leavesOf in range, far above what a scan reads ahead.
const entriesMax = 1 << 20

package pagesource

import (
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

const (
	// siblingsMin is how many leaves a bounded scan must have before it so that reading in the background is worth it.
	siblingsMin = 8
	// siblingsMax is how far a scan reads ahead: one submission.
	siblingsMax = 32
	// readaheadMin is how many leaves a scan without a limit reads in one submission at first. The number doubles each
	// time that the scan has used them up.
	readaheadMin = 2
)

// State is what a Prefetcher needs to know about the engine.
type State interface {
	Merging() bool      // a merge is running: reading in the background yields to it
	Checkpoint() uint64 // the number of the checkpoint whose root readers use now
}

// Prefetcher reads leaves for bounded scans in the background.
type Prefetcher struct {
	cached *Cached
	state  State
	ahead  *cache.Prefetcher
	slot   *pin.Slot // owned by the goroutine of Run
}

// NewPrefetcher makes a prefetcher. It works while Run does.
func NewPrefetcher(c *Cached, state State, registry *pin.Registry) *Prefetcher {
	p := &Prefetcher{cached: c, state: state, slot: registry.Slot()}
	p.ahead = cache.NewPrefetcher(c.cache, p)
	return p
}

// Run reads ahead for scans until ctx ends.
func (p *Prefetcher) Run(ctx context.Context) { p.ahead.Run(ctx) }

// Enter implements cache.Guard. The argument is the number of the checkpoint whose root the scan uses.
func (p *Prefetcher) Enter(checkpoint uint64) bool {
	if p.state.Merging() {
		return false
	}
	p.slot.Enter()
	if p.state.Checkpoint() != checkpoint {
		p.slot.Leave()
		return false
	}
	return true
}

// Leave implements cache.Guard.
func (p *Prefetcher) Leave() { p.slot.Leave() }

// Readahead is how far one scan reads ahead in its own goroutine.
type Readahead struct {
	next   int // leaves that the scan still has to visit, as its limit tells; 0: unknown
	length int // leaves to read at the next miss while next is unknown
}

// Restart prepares for a new scan. Without it, the next page of results continues the scan before.
func (r *Readahead) Restart() { *r = Readahead{length: readaheadMin} }

// Expect tells how many leaves the scan will visit; 0 means that it is not known.
func (r *Readahead) Expect(leaves int) { r.next = leaves }

// BeforeLeaf is called when the cursor t of a scan is about to enter a leaf. If the leaf is in memory, nothing is read: the
// leaves that were read last have not been used up. If it is not, the scan must wait for the device in any case, and the
// leaves that it will need next are read in the same submission:
//
//	the limit tells how many leaves    those, even on the seek: neighbours in one request cost little more than one page
//	a bound with enough siblings       this one; the others meanwhile in the background, window by window
//	a nearer bound                     the leaves inside it
//	neither                            at the first step that misses 2 leaves, then 4, 8 ... siblingsMax
//
// During a checkpoint the background yields, and a far bound counts as none. A seek without a limit reads one leaf, as a
// point read does. The checkpoint is that of the root that t walks.
func (r *Readahead) BeforeLeaf(p *Prefetcher, checkpoint uint64, t *btree.Cursor, id page.ID, forward, seek bool) {
	next := r.next
	if next > 0 {
		r.next--
	}
	if p.cached.cache.Contains(cache.ID(id)) || seek && next < 2 {
		return
	}
	var near [siblingsMax + 1]page.ID
	n := t.Ahead(near[:], forward)
	var ids [siblingsMax + 1]cache.ID
	for i, id := range near[:n] {
		ids[i] = cache.ID(id)
	}
	switch bounded, far := t.Bounded(forward), n > siblingsMin; {
	case next > 0:
		n = min(n, next)
	case bounded && far && !p.state.Merging():
		p.ahead.Request(checkpoint, ids[1:n], cache.Default)
		return
	case !bounded || far:
		n = min(n, r.length)
		r.length = min(2*r.length, siblingsMax)
	}
	if n = min(n, siblingsMax); n > 1 {
		slices.Sort(ids[:n]) // neighbours in the file become one request
		p.cached.cache.Prefetch(ids[:n], cache.Low)
	}
}

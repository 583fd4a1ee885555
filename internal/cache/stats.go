package cache

import "github.com/epochkv/epochkv/internal/invariants"

// counters are guarded by the cache's mutex. Hits are not among them: counting them here would make
// a hot read write shared memory. So each reader counts its own (Visit).
type counters struct {
	misses, joined, failed, uncached, shortages        uint64
	refaulted                                          uint64
	admitted, admitDropped, invalidated, shrinkEvicted uint64
	prefetched                                         uint64
}

// Stats is what the cache has done since New, and what it holds now.
type Stats struct {
	Frames   uint64 // frames that the cache may use
	Resident uint64 // pages cached
	Hot      uint64 // of these in the hot set
	Retired  uint64 // retired frames, which wait until readers leave
	Reserve  uint64 // frames that should be free or retired
	Flights  uint64 // pages being read

	Misses    uint64 // pages read because a reader asked for them
	Joined    uint64 // misses that waited for a read of another goroutine
	Failed    uint64 // reads that failed
	Uncached  uint64 // pages read into the heap because no frame was free
	Shortages uint64 // times no frame was free
	Refaults  uint64 // refaults: misses of pages that were evicted recently

	HandStats

	Admitted      uint64 // written pages that got a frame
	AdmitDropped  uint64 // written pages that got none: no frame was available, or the page was not worth one
	Invalidated   uint64 // pages invalidated by Invalidate
	ShrinkEvicted uint64 // pages dropped by Resize

	PrefetchStats
}

// HandStats is what the clock hand has done.
type HandStats struct {
	Evicted     uint64 // pages evicted by the hand, all cold
	Decremented uint64 // decrements of the usage counts of hot pages
	Passes      uint64 // passes of the hand
	Examined    uint64 // frames that the hand examined
}

// PrefetchStats is what prefetching has done.
type PrefetchStats struct {
	Prefetched       uint64 // pages prefetched
	PrefetchedUsed   uint64 // of these, visited
	PrefetchedWasted uint64 // of these, evicted without a visit
}

// Stats returns the cache's counters.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	if invariants.Enabled && c.table.Load() != nil { // counters can be read after Close
		c.checkFramesLocked()
	}
	n, s := c.counters, c.clock.counts()
	out := Stats{
		Frames: uint64(c.count), Retired: uint64(len(c.retired)), Reserve: uint64(c.reserve), Flights: uint64(len(c.flights)),
		Misses: n.misses, Joined: n.joined, Failed: n.failed, Uncached: n.uncached, Shortages: n.shortages, Refaults: n.refaulted,
		HandStats: HandStats{Evicted: s.evicted, Decremented: s.decremented, Passes: s.passes, Examined: s.examined},
		Admitted:  n.admitted, AdmitDropped: n.admitDropped, Invalidated: n.invalidated, ShrinkEvicted: n.shrinkEvicted,
		PrefetchStats: PrefetchStats{Prefetched: n.prefetched, PrefetchedUsed: s.used, PrefetchedWasted: s.wasted},
		Hot:           s.hot, Resident: c.resident,
	}
	return out
}

package cache

import "github.com/epochkv/epochkv/internal/invariants"

// counters are guarded by the cache's mutex. Hits are not among them: counting them here would make a hot read write shared memory, so
// each reader counts its own (Visit).
type counters struct {
	misses, joined, failed, uncached, shortages uint64
	returned                                    uint64
	admitted, admitDropped, forgotten, dropped  uint64
	prefetched                                  uint64
}

// Stats is what the cache has done since New, and what it holds now.
type Stats struct {
	Frames   uint64 // that the cache may use
	Resident uint64 // pages cached
	Hot      uint64 // of these in the HOT band
	Limbo    uint64 // frames evicted that wait for readers to leave
	Reserve  uint64 // frames to be kept free or in limbo
	Flights  uint64 // pages being read

	Misses    uint64 // pages read because somebody asked
	Joined    uint64 // misses that waited for a read under way
	Failed    uint64 // reads that failed
	Uncached  uint64 // pages read into the heap for want of a frame
	Shortages uint64 // times no frame was free
	Returned  uint64 // misses of pages that had been evicted not long ago

	Evicted uint64 // pages taken by the hand, all COOL
	Cooled  uint64 // steps taken off HOT pages
	Laps    uint64 // of the hand
	Visited uint64 // frames that the hand looked at

	Admitted     uint64 // pages handed over by Admit
	AdmitDropped uint64 // pages that found no frame then
	Forgotten    uint64 // pages dropped by Forget
	Dropped      uint64 // pages dropped by Resize

	Prefetched       uint64 // pages read ahead
	PrefetchedUsed   uint64 // of these, visited
	PrefetchedWasted uint64 // of these, evicted without a visit
}

// Stats returns the cache's counters.
func (c *Cache) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	if invariants.Enabled {
		c.checkFramesLocked()
	}
	n, s := c.counters, c.clock.counts()
	out := Stats{
		Frames: uint64(c.count), Limbo: uint64(len(c.limbo)), Reserve: uint64(c.reserve), Flights: uint64(len(c.flights)),
		Misses: n.misses, Joined: n.joined, Failed: n.failed, Uncached: n.uncached, Shortages: n.shortages, Returned: n.returned,
		Evicted: s.evicted, Cooled: s.cooled, Laps: s.laps, Visited: s.visited,
		Admitted: n.admitted, AdmitDropped: n.admitDropped, Forgotten: n.forgotten, Dropped: n.dropped,
		Prefetched: n.prefetched, PrefetchedUsed: s.used, PrefetchedWasted: s.wasted,
		Hot: s.hot, Resident: c.resident,
	}
	return out
}

package feed

import (
	"cmp"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
)

// counters count since New. Guarded by Feed.mu.
type counters struct {
	events        uint64
	catchUpBytes  uint64
	becameLagging BecameLagging
	gaps          uint64
	damages       uint64
	damage        error
}

// BecameLagging counts live watches that became lagging.
type BecameLagging struct {
	Queue  uint64 // their queues were full
	Memory uint64 // the queues of all watches took too much
	Fanout uint64 // the tailer was late, and very many watches of a client wanted the same commit
}

// Stats describe a feed.
type Stats struct {
	Epoch       keys.Epoch // up to which commits were offered to the live watches; zero without a watch
	Stable      keys.Epoch
	Lag         uint64 // epochs from Epoch to Stable
	CommitTime  uint64 // of the newest commit that was offered, in microseconds since 1970; zero if it is not known
	RingBytes   int64
	QueueBytes  int64
	MemoryBytes int64 // bound of both together

	Live, Lagging, Difference int // watches by state

	Events        uint64 // that came out of Next
	CatchUpBytes  uint64 // of the log that were read for lagging watches
	BecameLagging BecameLagging
	Gaps          uint64 // watches that needed a difference
	Damages       uint64 // attempts to read a damaged log
	Damage        error  // the last one; nil without
}

// Stats reads the counters.
func (f *Feed) Stats() Stats {
	stable := f.source.Stable()
	f.lock()
	defer f.unlock()
	c := &f.counters
	s := Stats{
		Stable: stable, RingBytes: f.ring.bytes, QueueBytes: f.memory.queues, MemoryBytes: f.options.MemoryBytes,
		Events: c.events, CatchUpBytes: c.catchUpBytes, BecameLagging: c.becameLagging, Gaps: c.gaps, Damages: c.damages, Damage: c.damage,
	}
	if f.tailer != nil {
		s.Epoch = f.ring.dispatched
		s.Lag = uint64(max(stable, s.Epoch) - s.Epoch)
	}
	if all := f.ring.commits.all(); len(all) > 0 {
		s.CommitTime = all[len(all)-1].Time
	}
	s.Live, s.Difference = f.live, f.gapped
	s.Lagging = len(f.watches) - s.Live - s.Difference
	return s
}

// listedAtOnce is how many watches a list describes before it lets others have Feed.mu.
const listedAtOnce = 256

// List describes the watches, oldest first. One that begins or ends meanwhile may be in it.
func (f *Feed) List() []WatchInfo {
	stable := f.source.Stable()
	f.lock()
	list := make([]WatchInfo, 0, len(f.watches))
	for _, w := range f.watches {
		list = append(list, w.infoLocked(stable))
		if len(list)%listedAtOnce == 0 {
			f.unlock()
			stable = f.source.Stable()
			f.lock()
		}
	}
	f.unlock()
	slices.SortFunc(list, func(a, b WatchInfo) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

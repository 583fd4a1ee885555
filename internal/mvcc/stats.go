package mvcc

import (
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage"
)

// Stats is a snapshot of the store's counters, each exact by itself.
type Stats struct {
	Visible    keys.Epoch
	Durable    keys.Epoch
	MinVisible keys.Epoch

	Commits       uint64 // since Open
	Conflicts     uint64 // commits refused because something they read had changed
	Preconditions uint64 // commits refused because a precondition did not hold

	Expiry  ExpiryStats
	History HistoryStats

	CheckpointErr error // why the last background checkpoint failed; nil if it did not

	Collections     uint64        // runs of the collector
	CollectTime     time.Duration // spent in them
	SessionsOpen    int           // in use
	Snapshots       pin.Usage
	ClockDifference time.Duration // the wall clock minus the store's
	CommitPause     time.Duration // total time that bulk loads have stopped commits
	CommitPauseMax  time.Duration // the longest commit pause
	Limits          Limits
	Storage         storage.Stats
}

// Stats reads the counters. It takes no lock that a commit takes.
func (s *Store) Stats() Stats {
	open, _ := s.Sessions()
	return Stats{
		Visible: s.Visible(), Durable: s.Durable(), MinVisible: s.MinVisible(),
		Commits: s.counters.commits(s.Visible() + 1 - s.recovery.Next), Conflicts: s.counters.conflicts.Load(), Preconditions: s.counters.preconditions.Load(),
		Collections: s.collector.collections.Load(), CollectTime: time.Duration(s.collector.collectNanos.Load()),
		CheckpointErr: s.CheckpointErr(), SessionsOpen: open, Snapshots: s.registry.Usage(time.Now()), Limits: s.options.Limits,
		ClockDifference: s.clock.Difference(),
		CommitPause:     time.Duration(s.bulk.pause.total.Load()), CommitPauseMax: time.Duration(s.bulk.pause.longest.Load()),
		Storage: s.engine.Stats(), Expiry: s.expirer.stats(), History: s.historyStats(),
	}
}

// HistoryStats describe what is kept of the past.
type HistoryStats struct {
	LowWatermark keys.Epoch // every epoch from it on is readable
	Holds        int
	HoldsExpired uint64 // since Open: that ended at their deadlines
	LogBytes     uint64 // since Open: of the log that were read to find the commits of times and versions
}

func (s *Store) historyStats() HistoryStats {
	t := &s.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	return HistoryStats{LowWatermark: s.LowWatermark(), Holds: len(t.holds), HoldsExpired: t.expired, LogBytes: t.logRead.Load()}
}

// ExpiryStats are the counters of the expirer, since Open.
type ExpiryStats struct {
	Expired uint64        // keys that were deleted because their deadline had passed
	Stale   uint64        // queue entries of former versions, deleted alone
	Skipped uint64        // entries that were left in the queue, because a damaged page hides their keys
	Commits uint64        // of the expirer
	Lag     time.Duration // how long ago the earliest deadline was that has not been handled
	Err     error         // why the last pass over the queue failed; nil if it did not
	Damage  error         // a damaged page that hides entries that are due, or their keys; nil if none is known
}

func (e *expirer) stats() ExpiryStats {
	out := ExpiryStats{
		Expired: e.expired.Load(), Stale: e.stale.Load(), Skipped: e.skipped.Load(), Commits: e.commits.Load(), Lag: e.lag(),
	}
	if err := e.failure.Load(); err != nil {
		out.Err = *err
	}
	if err := e.unread.Load(); err != nil {
		out.Damage = *err
	}
	return out
}

// commitCounters count how commits ended.
type commitCounters struct {
	noOps                    atomic.Uint64 // epochs without a commit: no-op records, or gaps of bulk loads; counted before they are visible
	conflicts, preconditions atomic.Uint64
	committed                atomic.Uint64 // as last reported; see commits
}

// commits counts commits by their epochs, so that no commit has to write to a counter that all share. The caller has read visible before: an
// epoch without a commit may then be subtracted too early, but never too late, and the larger of two counts is the better one.
func (c *commitCounters) commits(epochs keys.Epoch) uint64 {
	n := uint64(epochs) - min(uint64(epochs), c.noOps.Load())
	for {
		last := c.committed.Load()
		if n <= last {
			return last
		}
		if c.committed.CompareAndSwap(last, n) {
			return n
		}
	}
}

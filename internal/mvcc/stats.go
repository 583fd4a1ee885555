package mvcc

import (
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

	CheckpointErr error // why the last background checkpoint failed; nil if it did not

	Collections    uint64        // runs of the collector
	CollectTime    time.Duration // spent in them
	SessionsOpen   int
	Snapshots      pin.Usage
	CommitPause    time.Duration // total time that bulk loads have stopped commits
	CommitPauseMax time.Duration // the longest commit pause
	Limits         Limits
	Storage        storage.Stats
}

// Stats reads the counters. It takes no lock that a commit takes.
func (s *Store) Stats() Stats {
	s.sessions.mu.Lock()
	open, committed := s.sessions.open, s.committedLocked()
	s.sessions.mu.Unlock()
	return Stats{
		Visible: s.Visible(), Durable: s.Durable(), MinVisible: s.MinVisible(),
		Commits: committed, Conflicts: s.conflicts.Load(), Preconditions: s.preconditions.Load(),
		Collections: s.collections.Load(), CollectTime: time.Duration(s.collectNanos.Load()),
		CheckpointErr: s.CheckpointErr(), SessionsOpen: open, Snapshots: s.registry.Usage(time.Now()), Limits: s.limits,
		CommitPause: time.Duration(s.commitPause.total.Load()), CommitPauseMax: time.Duration(s.commitPause.longest.Load()),
		Storage: s.engine.Stats(),
	}
}

// committedLocked counts commits by their epochs, so that no commit has to write to a counter that all share. Visible is read first: an
// epoch without a commit may then be subtracted too early, but never too late, and the larger of two counts is the better one.
func (s *Store) committedLocked() uint64 {
	epochs := uint64(s.Visible() + 1 - s.recovery.Next)
	s.sessions.committed = max(s.sessions.committed, epochs-min(epochs, s.noOps.Load()))
	return s.sessions.committed
}

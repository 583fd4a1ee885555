package mvcc

import (
	"time"

	"epochkv/internal/pin"
	"epochkv/internal/storage"
	"epochkv/internal/storage/keys"
)

// Stats is a snapshot of the store's counters, each exact by itself.
type Stats struct {
	Visible    keys.Epoch
	Durable    keys.Epoch
	MinVisible keys.Epoch

	Commits       uint64 // since Open
	Conflicts     uint64 // commits refused because something they read had changed
	Preconditions uint64 // commits refused because a precondition did not hold

	Collections  uint64        // runs of the collector
	CollectTime  time.Duration // spent in them
	SessionsOpen int
	Snapshots    pin.Usage
	Limits       Limits
	Storage      storage.Stats
}

// Stats reads the counters. It takes no lock that a commit takes.
func (s *Store) Stats() Stats {
	s.sessions.mu.Lock()
	open := s.sessions.open
	s.sessions.mu.Unlock()
	return Stats{
		Visible: s.Visible(), Durable: s.Durable(), MinVisible: s.MinVisible(),
		Commits: s.commits.Load(), Conflicts: s.conflicts.Load(), Preconditions: s.preconditions.Load(),
		Collections: s.collections.Load(), CollectTime: time.Duration(s.collectNanos.Load()),
		SessionsOpen: open, Snapshots: s.registry.Usage(time.Now()), Limits: s.limits,
		Storage: s.engine.Stats(),
	}
}

package lease

import (
	"slices"
	"sync/atomic"
	"time"
)

// counters count since Open.
type counters struct {
	granted, keepAlives, expired, revoked, deleted, acquired, looks, failures atomic.Uint64
}

// Stats is the state of leases and locks.
type Stats struct {
	Leases       int           // that exist
	Waiters      int           // requests that wait for locks or observe them
	Lag          time.Duration // how long ago the oldest deadline passed of a lease that is not revoked yet
	Granted      uint64
	KeepAlives   uint64
	Expired      uint64 // leases whose deadline passed
	Revoked      uint64 // leases that ended, expired ones included
	KeysDeleted  uint64 // by revocations
	Acquisitions uint64 // of locks
	Failures     uint64 // revocations and records that are tried again
}

// Count is how many leases exist.
func (m *Manager) Count() int {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return len(m.leases)
}

// Stats is the current state.
func (m *Manager) Stats() Stats {
	c := &m.counters
	out := Stats{
		Granted: c.granted.Load(), KeepAlives: c.keepAlives.Load(), Expired: c.expired.Load(), Revoked: c.revoked.Load(),
		KeysDeleted: c.deleted.Load(), Acquisitions: c.acquired.Load(), Failures: c.failures.Load(),
	}
	now := m.options.Elapsed()
	m.mu.RLock()
	out.Leases = len(m.leases)
	late := slices.Concat(m.busy, m.tried.oldest())
	var due []*line
	for _, l := range m.lines.turns {
		if l.leases[0].at <= now {
			due = append(due, l)
		}
	}
	m.mu.RUnlock()
	for _, l := range due {
		if e := m.oldest(l, now); e != nil {
			late = append(late, e)
		}
	}
	for _, e := range late {
		e.mu.Lock()
		out.Lag = max(out.Lag, now-e.deadline)
		e.mu.Unlock()
	}
	m.locks.mu.Lock()
	defer m.locks.mu.Unlock()
	out.Waiters = m.locks.count
	return out
}

// oldest is the lease of a line that is late most; nil if none is. Those that were kept alive are passed over, as by the expirer, in parts.
func (m *Manager) oldest(l *line, now time.Duration) *entry {
	for {
		m.mu.Lock()
		n := 0
		for n < passedMax && len(l.leases) > 0 && l.leases[0].at <= now && m.passOver(l, now) {
			n++
		}
		if n < passedMax {
			defer m.mu.Unlock()
			if len(l.leases) == 0 || l.leases[0].at > now {
				return nil
			}
			return l.leases[0]
		}
		m.mu.Unlock()
		m.options.yield()
	}
}

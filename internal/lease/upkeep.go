package lease

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Two goroutines do what may take long while leases end: what is left of long leases is recorded, of which there may be a million, and records that could not
// be read are read again, from a device that may take half a minute to fail.

// What is left of a lease with a TTL of recordFrom and more is recorded every recordEvery, unless the lease was kept alive
// meanwhile.
const (
	recordFrom  = 10 * time.Minute
	recordEvery = 5 * time.Minute
)

// runRecords records what is left of long leases, again and again until ctx ends. Its commits wait as those of clients if there are too many.
func (m *Manager) runRecords(ctx context.Context) {
	for pause(ctx, recordEvery) {
		m.record(ctx)
	}
}

// runUnread reads again what could not be read at the start, until nothing is left or ctx ends.
func (m *Manager) runUnread(ctx context.Context) {
	for m.hasUnread() && pause(ctx, m.options.unreadEvery) {
		_ = m.readUnread(ctx) // it is tried again
	}
}

// pause reports whether a time has passed before ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// record records what is left of long leases. If it cannot, they live longer after a restart.
func (m *Manager) record(ctx context.Context) {
	all := m.longLeases()
	if len(all) == 0 {
		return
	}
	if err := m.recordRemaining(ctx, m.sessions.recorder, all); err != nil {
		m.counters.failures.Add(1)
	}
}

// toRecord is a lease of which recordRemaining writes what is left, unless a keep-alive has begun to remove it since.
type toRecord struct {
	lease   *entry
	cleared uint32 // of the lease, when that was decided
}

// recordRemaining records what is left of leases. Each commit has few of them, as those of a long revocation.
func (m *Manager) recordRemaining(ctx context.Context, x *mvcc.Session, all []toRecord) error {
	for len(all) > 0 {
		n := min(len(all), longStepKeys)
		if err := m.commitRemaining(ctx, x, all[:n]); err != nil {
			return err
		}
		all = all[n:]
	}
	return nil
}

// longLeases are the long leases that were not kept alive for recordEvery. They count as recorded from now on, before the commit.
func (m *Manager) longLeases() (all []toRecord) {
	now := m.options.Elapsed()
	m.mu.RLock()
	defer m.mu.RUnlock()
	looked := 0
	for _, e := range m.leases { // in parts, as first
		if looked++; looked%leasesPerTurn == 0 {
			m.mu.RUnlock()
			m.options.yield()
			m.mu.RLock()
		}
		e.mu.Lock()
		left := e.deadline - now
		if e.record.ttl >= recordFrom && left > 0 && left <= e.record.ttl-recordEvery && !e.revoking && e.clearing == 0 {
			e.recorded = true
			all = append(all, toRecord{lease: e, cleared: e.cleared})
		}
		e.mu.Unlock()
	}
	return all
}

func (m *Manager) commitRemaining(ctx context.Context, x *mvcc.Session, all []toRecord) error {
	var w mvcc.Write
	w.Durability = mvcc.DurabilityAsync
	w.SetOwn()
	for _, r := range all {
		w.Latch(leaseLatch(r.lease.id))
	}
	w.Under(func(l *mvcc.Latched) error {
		now := m.options.Elapsed()
		for _, r := range all {
			e := r.lease
			e.mu.Lock()
			if !e.revoking && e.cleared == r.cleared {
				stored := e.record
				stored.remaining = max(e.deadline-now, time.Second)
				l.Write().Batch.SetRecord(keys.SpaceSystem, leaseKey(e.id), stored.encode())
			}
			e.mu.Unlock()
		}
		return nil
	})
	_, err := x.Commit(ctx, &w)
	return err
}

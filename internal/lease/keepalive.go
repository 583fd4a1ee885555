package lease

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// KeepAlive begins the TTL of a lease anew, and returns it. If the lease is being revoked, KeepAlive waits for the end of
// that. The error is ErrNotFound, or why what is recorded of the lease could not be removed.
func (m *Manager) KeepAlive(ctx context.Context, id ID) (time.Duration, error) {
	for {
		e, err := m.find(id)
		if err != nil {
			return 0, err
		}
		e.mu.Lock()
		switch {
		case e.revoking:
			ended := e.endedLocked()
			e.mu.Unlock()
			select {
			case <-ended:
				return 0, &Error{ID: id, Err: ErrNotFound}
			case <-ctx.Done():
				return 0, context.Cause(ctx)
			}
		case e.recorded:
			e.mu.Unlock()
			if err := m.clearRecorded(ctx, e); err != nil {
				return 0, err
			}
			continue
		}
		e.deadline = m.options.Elapsed() + e.record.ttl
		e.mu.Unlock()
		m.counters.keepAlives.Add(1)
		return e.record.ttl, nil
	}
}

// What is left of a lease with a TTL of recordFrom and more is recorded every recordEvery, unless the lease was kept alive
// meanwhile.
const (
	recordFrom  = 10 * time.Minute
	recordEvery = 5 * time.Minute
)

// clearRecorded removes what is recorded of a lease. While it does, recordRemaining leaves the lease out; and what
// recordRemaining has decided before, it does not write after.
func (m *Manager) clearRecorded(ctx context.Context, e *entry) error {
	e.mu.Lock()
	e.clearing++
	e.cleared++
	e.mu.Unlock()
	err := m.commitCleared(ctx, e)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.clearing--
	if err == nil {
		e.recorded = false
	}
	return err
}

func (m *Manager) commitCleared(ctx context.Context, e *entry) error {
	x, err := m.store.Session()
	if err != nil {
		return err
	}
	defer x.Close()
	var w mvcc.Write
	w.Durability = mvcc.DurabilitySync
	w.SetOwn()
	key := leaseKey(e.id)
	w.Latch(keys.Append(nil, keys.SpaceSystem, key))
	w.Under(func(l *mvcc.Latched) error {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.revoking {
			return &Error{ID: e.id, Err: ErrRevoking}
		}
		l.Write().Batch.SetRecord(keys.SpaceSystem, key, e.record.encode())
		return nil
	})
	epoch, err := x.Commit(ctx, &w)
	if err != nil {
		return err
	}
	return m.store.Wait(ctx, epoch, mvcc.DurabilitySync)
}

// toRecord is a lease of which recordRemaining writes what is left, unless a keep-alive has begun to remove it since.
type toRecord struct {
	lease   *entry
	cleared int // of the lease, when that was decided
}

// recordRemaining records what is left of leases. Each commit has a bounded number of them.
func (m *Manager) recordRemaining(ctx context.Context, x *mvcc.Session, all []toRecord) error {
	const batchMax = 10_000
	for len(all) > 0 {
		n := min(len(all), batchMax)
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
	for _, e := range m.leases {
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

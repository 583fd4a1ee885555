package lease

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

const (
	// endingWaitMax is how long keep-alives wait for the end of leases. While a revocation cannot be committed, other
	// keep-alives of the client follow in the same stream, and no lease has a shorter TTL than TTLMin.
	endingWaitMax = TTLMin / 4
	// clearingMax is how many commits of one KeepAliveAll are in flight.
	clearingMax = 16
)

// KeepAlive begins the TTL of a lease anew, and returns it. If the lease is being revoked, KeepAlive waits for the end of
// that, for a bounded time. The error is ErrNotFound, ErrRevoking, or why what is recorded of the lease could not be removed.
func (m *Manager) KeepAlive(ctx context.Context, id ID) (time.Duration, error) {
	ending, cancel := context.WithTimeout(ctx, endingWaitMax)
	defer cancel()
	return m.keepAlive(ctx, ending, m.clientNumber(ctx), id)
}

// KeepAliveAll is KeepAlive of several leases, into ttls: zero for those that do not exist, or are being revoked. Those that
// need no wait come first, so that they do not end during the waits for others.
func (m *Manager) KeepAliveAll(ctx context.Context, ids []uint64, ttls []time.Duration) error {
	client := m.clientNumber(ctx)
	var later []int
	var ends []chan struct{} // of those that are being revoked
	for i, id := range ids {
		e, err := m.find(ID(id))
		if ttls[i] = 0; err != nil {
			continue
		}
		var ended chan struct{}
		if ttls[i], ended = m.tryKeepAlive(e, client); ended != nil {
			ends = append(ends, ended)
		} else if ttls[i] == 0 {
			later = append(later, i)
		}
	}
	if len(later)+len(ends) == 0 {
		return nil
	}
	ending, cancel := context.WithTimeout(ctx, endingWaitMax)
	defer cancel()
	errs := make([]error, len(later)+len(ends))
	var next atomic.Int64
	var all sync.WaitGroup
	for range min(clearingMax, len(later)) {
		all.Go(func() {
			for n := int(next.Add(1)) - 1; n < len(later); n = int(next.Add(1)) - 1 {
				i := later[n]
				ttls[i], errs[n] = m.keepAlive(ctx, ending, client, ID(ids[i]))
			}
		})
	}
	all.Wait()
	for n, ended := range ends {
		errs[len(later)+n] = awaitEnded(ctx, ending, 0, ended)
	}
	for _, err := range errs {
		if err != nil && !errors.Is(err, ErrNotFound) && !errors.Is(err, ErrRevoking) {
			return err
		}
	}
	return nil
}

// keepAlive waits for the end of a lease until the context ending ends.
func (m *Manager) keepAlive(ctx, ending context.Context, client uint64, id ID) (time.Duration, error) {
	for {
		e, err := m.find(id)
		if err != nil {
			return 0, err
		}
		ttl, ended := m.tryKeepAlive(e, client)
		switch {
		case ttl != 0:
			return ttl, nil
		case ended != nil:
			return 0, awaitEnded(ctx, ending, id, ended)
		}
		if !m.isDurable(e) {
			if err := m.awaitGrant(ctx, e); err != nil {
				return 0, err
			}
			continue
		}
		if err := m.clearRecorded(ctx, e); err != nil && !errors.Is(err, ErrRevoking) {
			return 0, err
		}
	}
}

// tryKeepAlive returns zero if what is recorded of the lease has to be removed before, if its grant is not durable yet, or if it is being revoked: then the
// channel is closed at its end. Otherwise the lease is the client's from now on.
func (m *Manager) tryKeepAlive(e *entry, client uint64) (ttl time.Duration, ended chan struct{}) {
	if ttl, ended = m.prolong(e); ttl != 0 && e.client.Load() != client {
		m.passTo(e, client)
	}
	return ttl, ended
}

func (m *Manager) prolong(e *entry) (ttl time.Duration, ended chan struct{}) {
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.revoking:
		return 0, e.endedLocked()
	case e.recorded || !m.isDurable(e):
		return 0, nil
	}
	e.deadline = m.options.Elapsed() + e.record.ttl
	m.counters.keepAlives.Add(1)
	return e.record.ttl, nil
}

func awaitEnded(ctx, ending context.Context, id ID, ended chan struct{}) error {
	select {
	case <-ended:
		return &Error{ID: id, Err: ErrNotFound}
	case <-ending.Done():
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return &Error{ID: id, Err: ErrRevoking}
}

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
	x, err := m.store.SessionOf(ctx)
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

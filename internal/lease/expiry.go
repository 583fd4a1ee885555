package lease

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

const (
	// retryEvery is the pause after a revocation that failed, because the disk is full for instance.
	retryEvery = 100 * time.Millisecond
	// damagedEvery is the pause after a revocation that has met damaged pages.
	damagedEvery = 10 * time.Second
	// turnMax is how many leases are revoked before their commits are waited for, together.
	turnMax = 256
	// turnTime is how long that goes on: with many keys, 256 leases would take longer than a second.
	turnTime = 20 * time.Millisecond
	// turnsAtOnce is how many turns of clients it has: each takes a millisecond, or one commit that takes longer.
	turnsAtOnce = 20
	// passedMax is how many leases that were kept alive are passed over in a row. Grants wait meanwhile.
	passedMax = 64
)

// Run revokes leases at their deadlines, and those that Revoke was asked for, until ctx ends. Without leases it sleeps. What may take long has goroutines
// of its own: see upkeep.go and counting.go.
func (m *Manager) Run(ctx context.Context) {
	var others sync.WaitGroup
	others.Go(func() { m.runCounts(ctx) })
	others.Go(func() { m.runRecords(ctx) })
	others.Go(func() { m.runUnread(ctx) })
	defer others.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		case <-timer.C:
		}
		if sleep, ok := m.turn(ctx); ok {
			timer.Reset(sleep)
		} else {
			timer.Stop()
		}
	}
}

// turn revokes what is due, and returns how long nothing will be; false if there are no leases.
func (m *Manager) turn(ctx context.Context) (sleep time.Duration, ok bool) {
	defer m.noteFailure()
	for {
		if sleep, ok = m.untilDue(); !ok || sleep > 0 || ctx.Err() != nil {
			return sleep, ok
		}
		if !m.revokeDue(ctx) {
			return retryEvery, true
		}
	}
}

// untilDue is how long no lease has to be revoked; false if there are none.
func (m *Manager) untilDue() (time.Duration, bool) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if len(m.lines.turns) == 0 {
		return 0, false
	}
	return max(0, m.lines.turns[0].since()-m.options.Elapsed()), true
}

// noteFailure lets those go that wait for the end of a lease, if the store has failed.
func (m *Manager) noteFailure() {
	if m.store.Err() != nil {
		m.failed.Do(func() { close(m.storeFailed) })
	}
}

// takeDue takes the lease that is next, if one is due. From then on it is being revoked. It is nil if many were kept alive: then the next call goes on.
func (m *Manager) takeDue() (e *entry, due bool) {
	now := m.options.Elapsed()
	m.mu.Lock()
	defer m.mu.Unlock()
	for range passedMax {
		if len(m.lines.turns) == 0 || m.lines.turns[0].since() > now {
			return nil, false
		}
		if l := m.lines.turns[0]; !m.passOver(l, now) {
			return m.take(l.leases[0]), true
		}
	}
	return nil, true
}

// take takes a lease that has to be revoked. Manager.mu is held.
func (m *Manager) take(e *entry) *entry {
	m.unschedule(e)
	m.busy = append(m.busy, e)
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.revoking { // else that was asked for, or goes on
		e.revoking = true
		m.counters.expired.Add(1)
	}
	return e
}

// revokeDue revokes leases that are due, and waits for their commits together. It reports false if not all could be revoked; the others will be tried
// again. A lease that has met damage does not count: it is tried again later, and keeps no other waiting. Nor does one with many keys, of which
// its client's next turn deletes more.
func (m *Manager) revokeDue(ctx context.Context) bool {
	var done []*entry
	var last keys.Epoch
	all, x, until := true, m.sessions.revoker, time.Now().Add(m.turnTime)
	defer x.Trim()
	for n := 0; n < turnMax && (n == 0 || time.Now().Before(until)); n++ {
		e, due := m.takeDue()
		if !due {
			break
		}
		if e == nil {
			continue
		}
		began := m.options.Elapsed()
		epoch, err := m.revoke(ctx, x, e)
		took := m.options.Elapsed() - began
		if err != nil {
			all = m.again(e, err) && all
		} else {
			done, last = append(done, e), max(last, epoch)
		}
		m.charge(e, took)
	}
	if last != 0 {
		err := m.store.Wait(ctx, last, mvcc.DurabilitySync)
		for _, e := range done {
			if err == nil {
				m.finish(e)
			} else { // the store has failed or closes
				all = m.again(e, err) && all
			}
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.busy = nil
	return all
}

// again lets a revocation be tried again, or go on. It reports false if it has failed, and not for damage.
func (m *Manager) again(e *entry, err error) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.tried.add(e, err)
	now := m.options.Elapsed()
	if errors.Is(err, errGoesOn) {
		m.schedule(e, now)
		return true
	}
	m.counters.failures.Add(1)
	if errors.Is(err, mvcc.ErrDamaged) {
		m.schedule(e, now+damagedEvery)
		return true
	}
	m.schedule(e, now+retryEvery)
	return false
}

// finish ends a lease whose revocation is durable.
func (m *Manager) finish(e *entry) {
	m.mu.Lock()
	if m.leases[e.id] == e { // else the id was granted again, once the revocation was committed
		delete(m.leases, e.id)
	}
	m.unschedule(e)
	m.tried.remove(e)
	m.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.gone = true
	if e.ended != nil {
		close(e.ended)
	}
	m.counters.revoked.Add(1)
}

// Revoke ends a lease now, and returns when that is durable. If ctx ends before that, the lease is revoked all the same.
// The error is ErrNotFound, why ctx ended, mvcc.ErrFailed if the store takes no writes, or *mvcc.OutcomeUnknownError if it has failed
// meanwhile. A lease of which the record could not be read can be revoked; while it is being granted, only when that has ended.
func (m *Manager) Revoke(ctx context.Context, id ID) error {
	e, err := m.findRevocable(id)
	if err != nil {
		return err
	}
	if err := m.store.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	for e == nil && m.granting[id] != nil { // what would be revoked at once is not what is granted
		m.mu.Unlock()
		if err := m.awaitEntered(ctx, id); err != nil {
			return err
		}
		m.mu.Lock()
		e = m.leases[id]
	}
	if e == nil {
		if e = m.leases[id]; e == nil {
			e = &entry{id: id, index: notScheduled, deadline: m.options.Elapsed(), record: record{ttl: TTLMin}}
			m.leases[id] = e
		}
	}
	e.mu.Lock()
	if !e.revoking {
		e.revoking = true
		m.unschedule(e)
		m.schedule(e, 0) // before those of the client that end by themselves: a request waits for it
	}
	ended := e.endedLocked()
	e.mu.Unlock()
	m.mu.Unlock()
	m.wakeUp()
	select {
	case <-ended:
		return nil
	case <-m.storeFailed:
		return unlessEnded(ended, &mvcc.OutcomeUnknownError{Epoch: m.store.Visible(), Cause: m.store.Err()})
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// unlessEnded is nil if a lease has ended before the store failed.
func unlessEnded(ended chan struct{}, err error) error {
	select {
	case <-ended:
		return nil
	default:
		return err
	}
}

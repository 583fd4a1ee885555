package lease

import (
	"context"
	"errors"
	"slices"
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
	// turnTime is how long a turn goes on with leases that have many keys, of which it deletes a few in any case. A million keys
	// take many seconds, in which the other leases must not live on.
	turnTime = 20 * time.Millisecond
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
	failed := false
	for ctx.Err() == nil && !failed {
		due := m.takeDue(turnMax)
		if len(due) == 0 {
			break
		}
		failed = !m.revokeAll(ctx, due)
	}
	m.noteFailure()
	m.mu.RLock()
	defer m.mu.RUnlock()
	switch {
	case failed:
		return retryEvery, true
	}
	now := m.options.Elapsed()
	if len(m.deadlines) > 0 {
		sleep, ok = max(0, m.deadlines[0].at-now), true
	}
	for _, e := range m.asked { // those that have met damage
		if left := max(0, e.retryAt-now); !ok || left < sleep {
			sleep, ok = left, true
		}
	}
	return sleep, ok
}

// noteFailure lets those go that wait for the end of a lease, if the store has failed.
func (m *Manager) noteFailure() {
	if m.store.Err() != nil {
		m.failed.Do(func() { close(m.storeFailed) })
	}
}

// takeDue takes leases that have to be revoked. From then on they are being revoked.
func (m *Manager) takeDue(limit int) (due []*entry) {
	now := m.options.Elapsed()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked = slices.DeleteFunc(m.asked, func(e *entry) bool {
		take := e.retryAt <= now && len(due) < limit/2 // those that are tried again leave room for others
		if take {
			due = append(due, e)
		}
		return take
	})
	for len(due) < limit && len(m.deadlines) > 0 && m.deadlines[0].at <= now {
		e := m.deadlines[0]
		m.unschedule(e)
		e.mu.Lock()
		if e.deadline > now { // it was kept alive
			m.schedule(e, e.deadline)
		} else if !e.revoking {
			e.revoking = true
			due = append(due, e)
			m.counters.expired.Add(1)
		}
		e.mu.Unlock()
	}
	m.busy = due
	return due
}

// revokeAll reports false if not all could be revoked; the others will be tried again. A lease that has met damage does not count:
// it is tried again later, and keeps no other waiting. Nor does one with many keys, of which the next turn deletes more.
func (m *Manager) revokeAll(ctx context.Context, due []*entry) bool {
	done, failed, last := m.commitAll(ctx, due)
	if last != 0 && m.store.Wait(ctx, last, mvcc.DurabilitySync) != nil { // the store has failed or closes
		for _, e := range done {
			failed = append(failed, failedRevocation{e, nil})
		}
		done = nil
	}
	for _, e := range done {
		m.finish(e)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.busy = nil
	all, now := true, m.options.Elapsed()
	for _, f := range failed {
		switch f.lease.damage, f.lease.retryAt = nil, now+retryEvery; {
		case errors.Is(f.err, errGoesOn):
			f.lease.retryAt = now
		case errors.Is(f.err, mvcc.ErrDamaged):
			f.lease.damage, f.lease.retryAt = f.err, now+damagedEvery
		default:
			all = false
		}
		m.asked = append(m.asked, f.lease)
	}
	return all
}

// failedRevocation is a lease that is not revoked yet, and why.
type failedRevocation struct {
	lease *entry
	err   error
}

// commitAll revokes leases, and returns the newest epoch. A lease that cannot be revoked, because a page of its keys is
// damaged, does not keep the others.
func (m *Manager) commitAll(ctx context.Context, due []*entry) (done []*entry, failed []failedRevocation, last keys.Epoch) {
	x, until := m.sessions.revoker, time.Now().Add(m.turnTime)
	defer x.Trim()
	for _, e := range due {
		epoch, err := m.revoke(ctx, x, e, until)
		if err != nil {
			if !errors.Is(err, errGoesOn) {
				m.counters.failures.Add(1)
			}
			failed = append(failed, failedRevocation{e, err})
			continue
		}
		done, last = append(done, e), max(last, epoch)
	}
	return done, failed, last
}

// finish ends a lease whose revocation is durable.
func (m *Manager) finish(e *entry) {
	m.mu.Lock()
	if m.leases[e.id] == e { // else the id was granted again, once the revocation was committed
		delete(m.leases, e.id)
	}
	m.unschedule(e)
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
// meanwhile. A lease of which the record could not be read can be revoked.
func (m *Manager) Revoke(ctx context.Context, id ID) error {
	e, err := m.findRevocable(id)
	if err != nil {
		return err
	}
	if err := m.store.Err(); err != nil {
		return err
	}
	m.mu.Lock()
	if e == nil {
		if e = m.leases[id]; e == nil {
			e = &entry{id: id, index: notScheduled, deadline: m.options.Elapsed(), record: record{ttl: TTLMin}}
			m.leases[id] = e
		}
	}
	e.mu.Lock()
	if !e.revoking {
		e.revoking = true
		m.asked = append(m.asked, e)
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

package lease

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

const (
	// retryEvery is the pause after a revocation that failed: the disk is full, or a page is damaged.
	retryEvery = 100 * time.Millisecond
	// turnMax is how many leases are revoked before their commits are waited for, together.
	turnMax = 256
)

// Run revokes leases at their deadlines, and those that Revoke was asked for, until ctx ends. Without leases it sleeps.
func (m *Manager) Run(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	nextRecord := m.options.Elapsed() + recordEvery
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.wake:
		case <-timer.C:
		}
		sleep, ok := m.turn(ctx)
		if now := m.options.Elapsed(); now >= nextRecord {
			nextRecord = now + recordEvery
			m.record(ctx)
		}
		if sleep = min(sleep, nextRecord-m.options.Elapsed()); ok {
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
	m.mu.RLock()
	defer m.mu.RUnlock()
	switch {
	case failed:
		return retryEvery, true
	case len(m.deadlines) == 0:
		return 0, false
	}
	return max(0, m.deadlines[0].at-m.options.Elapsed()), true
}

// takeDue takes leases that have to be revoked. From then on they are being revoked.
func (m *Manager) takeDue(limit int) (due []*entry) {
	now := m.options.Elapsed()
	m.mu.Lock()
	defer m.mu.Unlock()
	n := min(limit/2, len(m.asked)) // those that are tried again leave room for others
	due = append(due, m.asked[:n]...)
	m.asked = append(m.asked[:0], m.asked[n:]...)
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

// revokeAll reports false if not all could be revoked; the others will be tried again.
func (m *Manager) revokeAll(ctx context.Context, due []*entry) bool {
	done, failed, last := m.commitAll(ctx, due)
	if last != 0 && m.store.Wait(ctx, last, mvcc.DurabilitySync) != nil {
		done, failed = nil, due // the store has failed or closes
	}
	for _, e := range done {
		m.finish(e)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.busy = nil
	m.asked = append(m.asked, failed...)
	return len(failed) == 0
}

// commitAll revokes leases, and returns the newest epoch. A lease that cannot be revoked, because a page of its keys is
// damaged, does not keep the others.
func (m *Manager) commitAll(ctx context.Context, due []*entry) (done, failed []*entry, last keys.Epoch) {
	m.revoker.mu.Lock()
	defer m.revoker.mu.Unlock()
	x := m.revoker.session
	defer x.Trim()
	for _, e := range due {
		epoch, err := m.revoke(ctx, x, e)
		if err != nil {
			m.counters.failures.Add(1)
			failed = append(failed, e)
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

// record records what is left of long leases. If it cannot, they live longer after a restart.
func (m *Manager) record(ctx context.Context) {
	all := m.longLeases()
	if len(all) == 0 {
		return
	}
	m.revoker.mu.Lock()
	defer m.revoker.mu.Unlock()
	if err := m.recordRemaining(ctx, m.revoker.session, all); err != nil {
		m.counters.failures.Add(1)
	}
}

// Revoke ends a lease now, and returns when that is durable. If ctx ends before that, the lease is revoked all the same.
// The error is ErrNotFound, or why ctx ended.
func (m *Manager) Revoke(ctx context.Context, id ID) error {
	e, err := m.find(id)
	if err != nil {
		return err
	}
	m.mu.Lock()
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
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

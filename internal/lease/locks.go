package lease

import (
	"context"
	"errors"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// A lock is one record. It is written by the commit with which its holder acquires it, and deleted by the commit that
// releases it or revokes the holder's lease. So the epoch of its newest version is the token of its holder, and a write
// with the condition mvcc.LockHeld is refused as soon as the holder has lost the lock.
//
//	Acquire ─► queue of the name ─► first of it: commit "o|name, if it does not exist" ─► token
//	              ▲                       │ held
//	              └── a release or a revocation wakes the first ◄┘
//
// Waiters are in memory: a waiter that leaves takes its place in the queue along, and after a restart of the server the
// clients that still wait come again.

// LockValueBytesMax is the longest value of a lock.
const LockValueBytesMax = 1 << 10

// lockNameSlack is how much shorter than a key the name of a lock must be: the key of its attachment is longer.
const lockNameSlack = 16

// ErrHeld means that another lease holds the lock.
var ErrHeld = errors.New("the lock is held by another lease")

// Held describes the holder of a lock.
type Held struct {
	Token keys.Epoch // zero if the lock is not held
	Lease ID
	Value []byte
	Await keys.Epoch // of Acquire: the answer may be sent once it is durable
}

func (m *Manager) checkLock(name, value []byte) error {
	switch {
	case len(name) == 0 || len(name) > m.store.KeyBytesMax()-lockNameSlack:
		return ErrLockName
	case len(value) > LockValueBytesMax:
		return ErrLockValue
	}
	return m.store.RequireFeatureLevel(keys.FeatureLevelHistory, "locks")
}

// Acquire makes a lease the holder of a lock, and returns its token; the caller answers once Held.Await is durable. If the
// lease holds the lock already, it is the token of then. If another one does, Acquire waits for its turn until ctx ends, or
// without wait returns ErrHeld and the holder. If the lease ends meanwhile, the error is ErrNotFound or ErrRevoking; if the attempt
// was undone, it is ErrUndone; if the store takes no writes any more, it is mvcc.ErrFailed; if the client may not wait, it is ErrWaiters.
//
// The caller undoes the attempt if it cannot answer with the token.
func (m *Manager) Acquire(ctx context.Context, number uint64, name []byte, id ID, value []byte, wait bool) (Held, error) {
	if err := m.checkLock(name, value); err != nil {
		return Held{}, err
	}
	e, err := m.find(id)
	if err != nil {
		return Held{}, err
	}
	w, err := m.locks.wait(m.clientOf(ctx), name, attempt{id, number})
	if err != nil {
		return m.acquireAtOnce(ctx, attempt{id, number}, name, e, value, wait)
	}
	defer m.locks.leave(name, w)
	e.mu.Lock()
	ended := e.endedLocked()
	e.mu.Unlock()
	for { // even if it is not its turn: the lease may hold the lock already
		held, err := m.tryAcquire(ctx, w, name, e, value, m.locks.first(name, w))
		if err != nil || held.Lease == id {
			return held, err
		}
		if !wait {
			return held, ErrHeld
		}
		select {
		case <-w.look:
		case <-ended:
			return Held{}, &Error{ID: id, Err: ErrNotFound}
		case <-m.storeFailed: // the holder's lease cannot end any more
			return Held{}, m.store.Err()
		case <-ctx.Done():
			return Held{}, context.Cause(ctx)
		}
	}
}

// acquireAtOnce is Acquire without a place to wait: others that wait for the lock are before it.
func (m *Manager) acquireAtOnce(ctx context.Context, a attempt, name []byte, e *entry, value []byte, wait bool) (Held, error) {
	held, err := m.tryAcquire(ctx, &lockWaiter{attempt: a}, name, e, value, !m.locks.waits(name))
	switch {
	case err != nil || held.Lease == e.id:
		return held, err
	case wait:
		return Held{}, ErrWaiters
	}
	return held, ErrHeld
}

// clientOf is the client of a request; none if they are not told apart.
func (m *Manager) clientOf(ctx context.Context) string {
	if m.options.Client == nil {
		return ""
	}
	return m.options.Client(ctx)
}

// lockWrite is a write that holds the latch of a lock, with the lock's key in SpaceSystem, and its internal key.
func lockWrite(name []byte) (w *mvcc.Write, key, internal []byte) {
	key = lockKey(name)
	internal = keys.Append(nil, keys.SpaceSystem, key)
	w = &mvcc.Write{Durability: mvcc.DurabilitySync}
	w.SetOwn()
	w.Latch(internal)
	return w, key, internal
}

// tryAcquire acquires the lock for an attempt if it is not held and take is set, and returns the holder.
func (m *Manager) tryAcquire(ctx context.Context, waiter *lockWaiter, name []byte, e *entry, value []byte, take bool) (held Held, err error) {
	x, err := m.store.SessionOf(ctx)
	if err != nil {
		return Held{}, err
	}
	defer x.Close()
	m.counters.looks.Add(1)
	w, key, internal := lockWrite(name)
	w.Latch(leaseLatch(e.id))
	taken := false
	w.Under(func(l *mvcc.Latched) error {
		held, taken = Held{}, false
		n, err := l.Newest(internal)
		if err != nil {
			return err
		}
		if m.locks.isUndone(waiter) {
			return ErrUndone
		}
		if n.Found {
			held = Held{Token: n.Epoch, Lease: ID(n.Metadata.Lease), Value: slices.Clone(n.Value)}
			if held.Lease == e.id { // the token is worth nothing once the revocation is committed
				return errors.Join(m.checkLive(e.id), tellToken(l, uint64(e.id), internal, waiter.attempt.number))
			}
			return nil
		}
		if !take {
			return m.checkLive(e.id)
		}
		if err := m.admit(e.id, 1); err != nil {
			return err
		}
		taken = true
		l.Write().Batch.SetMetadataShared(keys.SpaceSystem, key, &metadata.Fields{Lease: uint64(e.id)}, value)
		l.Write().Batch.SetRecord(keys.SpaceSystem, lockAttachment(uint64(e.id), internal), encodeAttempts([]uint64{waiter.attempt.number}))
		return nil
	})
	epoch, err := x.Commit(ctx, w)
	switch {
	case err != nil:
	case taken:
		held = Held{Token: epoch, Lease: e.id, Value: value}
		m.counters.acquired.Add(1)
		m.locks.changed(name, held, epoch)
	case held.Token != 0:
		m.locks.changed(name, held, held.Token)
	}
	held.Await = max(held.Token, epoch, x.Await()) // the note that this attempt was told the token, and that the lock was released, too
	return held, err
}

// tellToken notes that one more attempt of the lease that holds a lock is told its token.
func tellToken(l *mvcc.Latched, id uint64, internal []byte, number uint64) error {
	attachment := lockAttachment(id, internal)
	record, err := l.Newest(keys.Append(nil, keys.SpaceSystem, attachment))
	if err != nil {
		return err
	}
	if all := decodeAttempts(record.Value); len(all) > 0 && !slices.Contains(all, number) {
		l.Write().Batch.SetRecord(keys.SpaceSystem, attachment, encodeAttempts(append(all, number)))
	}
	return nil
}

// Release gives up a lock that is held with this token, and reports whether it was; the epoch is that of the commit.
func (m *Manager) Release(ctx context.Context, name []byte, token keys.Epoch) (released bool, epoch keys.Epoch, err error) {
	if err := m.checkLock(name, nil); err != nil {
		return false, 0, err
	}
	x, err := m.store.SessionOf(ctx)
	if err != nil {
		return false, 0, err
	}
	defer x.Close()
	w, key, internal := lockWrite(name)
	w.Under(func(l *mvcc.Latched) error {
		n, err := l.Newest(internal)
		if err != nil || !n.Found || n.Epoch != token {
			return err
		}
		l.Write().Batch.DeleteRecord(keys.SpaceSystem, key)
		l.Write().Batch.DeleteRecord(keys.SpaceSystem, lockAttachment(n.Metadata.Lease, internal))
		return nil
	})
	if epoch, err = x.Commit(ctx, w); err != nil || epoch == 0 {
		return false, max(epoch, x.Await()), err
	}
	m.locks.changed(name, Held{}, epoch)
	return true, epoch, nil
}

// Holder is the holder of a lock; the answer may be sent once await is durable.
func (m *Manager) Holder(ctx context.Context, name []byte) (held Held, await keys.Epoch, err error) {
	held, _, await, err = m.holder(ctx, name)
	return held, await, err
}

// holder is Holder with the epoch of the commit that made it the holder, or the lock free; zero if the lock was never held.
func (m *Manager) holder(ctx context.Context, name []byte) (held Held, since, await keys.Epoch, err error) {
	if err := m.checkLock(name, nil); err != nil {
		return Held{}, 0, 0, err
	}
	x, err := m.store.SessionOf(ctx)
	if err != nil {
		return Held{}, 0, 0, err
	}
	defer x.Close()
	n, err := x.NewestVersion(ctx, keys.Append(nil, keys.SpaceSystem, lockKey(name)))
	if err == nil && n.Found {
		held = Held{Token: n.Epoch, Lease: ID(n.Metadata.Lease), Value: n.Value}
	}
	return held, n.Epoch, x.Await(), err
}

// Observe calls yield with the holder of a lock, now and whenever it has changed, until yield fails or ctx ends. If holders
// change faster than yield returns, it misses some of them. After the first look it reads nothing: each change brings the holder.
func (m *Manager) Observe(ctx context.Context, name []byte, yield func(held Held, await keys.Epoch) error) error {
	if err := m.checkLock(name, nil); err != nil {
		return err
	}
	w, err := m.locks.observe(m.clientOf(ctx), name)
	if err != nil {
		return err
	}
	defer m.locks.leave(name, w)
	held, since, await, err := m.holder(ctx, name)
	if err == nil {
		err = yield(held, await)
	}
	for token := held.Token; err == nil; {
		select {
		case <-w.look:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		held, at := m.locks.holder(name)
		if at <= since || held.Token == token { // it has seen that, or a later change
			continue
		}
		since, token = at, held.Token
		err = yield(held, at)
	}
	return err
}

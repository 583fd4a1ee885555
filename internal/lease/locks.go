package lease

import (
	"context"
	"errors"
	"sync"

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
}

// lockTable has the requests that wait for locks, and those that observe them.
type lockTable struct {
	mu     sync.Mutex
	queues map[string]*lockQueue
	count  int // of waiters and observers
	max    int
}

// lockQueue is what waits for one lock. It exists while something does.
type lockQueue struct {
	waiters   []*lockWaiter // the first one may acquire the lock
	observers map[*lockWaiter]struct{}
}

// lockWaiter is a request. Its channel holds a token if it must look again.
type lockWaiter struct{ look chan struct{} }

func (w *lockWaiter) signal() {
	select {
	case w.look <- struct{}{}:
	default:
	}
}

// join enters a request into the queue of a lock, or among its observers.
func (t *lockTable) join(name []byte, observes bool) (*lockWaiter, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count >= t.max {
		return nil, ErrWaiters
	}
	q := t.queues[string(name)]
	if q == nil {
		q = &lockQueue{observers: map[*lockWaiter]struct{}{}}
		t.queues[string(name)] = q
	}
	w := &lockWaiter{look: make(chan struct{}, 1)}
	if observes {
		q.observers[w] = struct{}{}
	} else {
		q.waiters = append(q.waiters, w)
	}
	t.count++
	return w, nil
}

// leave removes a request. The next one in the queue looks.
func (t *lockTable) leave(name []byte, w *lockWaiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[string(name)]
	t.count--
	if _, observes := q.observers[w]; observes {
		delete(q.observers, w)
	} else {
		q.remove(w)
	}
	if len(q.waiters)+len(q.observers) == 0 {
		delete(t.queues, string(name))
	}
}

func (q *lockQueue) remove(w *lockWaiter) {
	for i := range q.waiters {
		if q.waiters[i] == w {
			q.waiters = append(q.waiters[:i], q.waiters[i+1:]...)
			break
		}
	}
	if len(q.waiters) > 0 {
		q.waiters[0].signal()
	}
}

// first reports whether it is a waiter's turn.
func (t *lockTable) first(name []byte, w *lockWaiter) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.queues[string(name)].waiters[0] == w
}

// changed wakes what has to look at a lock that was acquired or released.
func (t *lockTable) changed(name []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[string(name)]
	if q == nil {
		return
	}
	if len(q.waiters) > 0 {
		q.waiters[0].signal()
	}
	for w := range q.observers {
		w.signal()
	}
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

// Acquire makes a lease the holder of a lock, and returns its token; the caller answers once that epoch is durable. If the
// lease holds the lock already, it is the token of then. If another one does, Acquire waits for its turn until ctx ends, or
// without wait returns ErrHeld and the holder. If the lease ends meanwhile, the error is ErrNotFound or ErrRevoking.
func (m *Manager) Acquire(ctx context.Context, name []byte, id ID, value []byte, wait bool) (Held, error) {
	if err := m.checkLock(name, value); err != nil {
		return Held{}, err
	}
	e, err := m.find(id)
	if err != nil {
		return Held{}, err
	}
	w, err := m.locks.join(name, false)
	if err != nil {
		return Held{}, err
	}
	defer m.locks.leave(name, w)
	e.mu.Lock()
	ended := e.endedLocked()
	e.mu.Unlock()
	for attempt := 0; ; attempt++ {
		if turn := m.locks.first(name, w); turn || attempt == 0 { // the lease may hold the lock already
			held, err := m.tryAcquire(ctx, name, e, value, turn)
			if err != nil || held.Lease == id {
				return held, err
			}
			if !wait {
				return held, ErrHeld
			}
		}
		select {
		case <-w.look:
		case <-ended:
			return Held{}, &Error{ID: id, Err: ErrNotFound}
		case <-ctx.Done():
			return Held{}, context.Cause(ctx)
		}
	}
}

// lockWrite is a write that holds the latch of a lock, with the lock's key in SpaceSystem, and its internal key.
func lockWrite(name []byte) (w *mvcc.Write, key, internal []byte) {
	key = lockKey(nil, name)
	internal = keys.Append(nil, keys.SpaceSystem, key)
	w = &mvcc.Write{Durability: mvcc.DurabilitySync}
	w.SetOwn()
	w.Latch(internal)
	return w, key, internal
}

// tryAcquire acquires the lock if it is not held and take is set, and returns the holder.
func (m *Manager) tryAcquire(ctx context.Context, name []byte, e *entry, value []byte, take bool) (held Held, err error) {
	x, err := m.store.Session()
	if err != nil {
		return Held{}, err
	}
	defer x.Close()
	w, key, internal := lockWrite(name)
	w.Latch(leaseLatch(e.id))
	w.Under(func(l *mvcc.Latched) error {
		n, err := l.Newest(internal)
		if err != nil {
			return err
		}
		if n.Found {
			held = Held{Token: n.Epoch, Lease: ID(n.Metadata.Lease)}
			if held.Lease == e.id { // the token is worth nothing once the revocation is committed
				return m.checkLive(e.id)
			}
			return nil
		}
		if err := m.checkLive(e.id); err != nil || !take {
			return err
		}
		l.Write().Batch.SetMetadata(keys.SpaceSystem, key, &metadata.Fields{Lease: uint64(e.id)}, value)
		l.Write().Batch.SetRecord(keys.SpaceSystem, keys.AppendOwned(nil, keys.SystemAttachment, uint64(e.id), internal), nil)
		return nil
	})
	epoch, err := x.Commit(ctx, w)
	if err == nil && epoch != 0 {
		held = Held{Token: epoch, Lease: e.id, Value: value}
		m.counters.acquired.Add(1)
		m.locks.changed(name)
	}
	return held, err
}

// Release gives up a lock that is held with this token, and reports whether it was; the epoch is that of the commit.
func (m *Manager) Release(ctx context.Context, name []byte, token keys.Epoch) (released bool, epoch keys.Epoch, err error) {
	if err := m.checkLock(name, nil); err != nil {
		return false, 0, err
	}
	x, err := m.store.Session()
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
		l.Write().Batch.DeleteRecord(keys.SpaceSystem, keys.AppendOwned(nil, keys.SystemAttachment, n.Metadata.Lease, internal))
		return nil
	})
	if epoch, err = x.Commit(ctx, w); err != nil || epoch == 0 {
		return false, max(epoch, x.Await()), err
	}
	m.locks.changed(name)
	return true, epoch, nil
}

// Holder is the holder of a lock; the answer may be sent once await is durable.
func (m *Manager) Holder(ctx context.Context, name []byte) (held Held, await keys.Epoch, err error) {
	if err := m.checkLock(name, nil); err != nil {
		return Held{}, 0, err
	}
	x, err := m.store.Session()
	if err != nil {
		return Held{}, 0, err
	}
	defer x.Close()
	n, err := x.NewestVersion(ctx, keys.Append(nil, keys.SpaceSystem, lockKey(nil, name)))
	if err == nil && n.Found {
		held = Held{Token: n.Epoch, Lease: ID(n.Metadata.Lease), Value: n.Value}
	}
	return held, x.Await(), err
}

// Observe calls yield with the holder of a lock, now and whenever it has changed, until yield fails or ctx ends. If holders
// change faster than yield returns, it misses some of them.
func (m *Manager) Observe(ctx context.Context, name []byte, yield func(held Held, await keys.Epoch) error) error {
	if err := m.checkLock(name, nil); err != nil {
		return err
	}
	w, err := m.locks.join(name, true)
	if err != nil {
		return err
	}
	defer m.locks.leave(name, w)
	for first, last := true, keys.Epoch(0); ; first = false {
		held, await, err := m.Holder(ctx, name)
		if err != nil {
			return err
		}
		if first || held.Token != last {
			if err := yield(held, await); err != nil {
				return err
			}
		}
		last = held.Token
		select {
		case <-w.look:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

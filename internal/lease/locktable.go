package lease

import (
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/keys"
)

// lockTable has the requests that wait for locks, those that observe them, and the attempts that were undone.
type lockTable struct {
	mu     sync.Mutex
	queues map[string]*lockQueue
	count  int // of waiters and observers
	max    int

	undone      map[attempt]struct{}
	undoneOrder []attempt // the same, as a ring
	undoneNext  int
}

// attempt is a request of a lease to acquire a lock.
type attempt struct {
	lease  ID
	number uint64
}

// undoneMax bounds the attempts that are remembered as undone. A request can be so much later than the one that undoes it only
// if its connection is broken, and the server has not noticed.
const undoneMax = 1 << 16

// lockQueue is what waits for one lock, and what is known of its holder. It exists while something waits for the lock, or observes
// it, so that a change wakes only what it concerns: the first waiter when the lock is free, the others of a lease that has become the
// holder, and observers with what they yield.
type lockQueue struct {
	waiters   []*lockWaiter // the first one may acquire the lock
	leases    map[ID]int    // how many of the waiters each lease has
	observers map[*lockWaiter]struct{}
	holder    Held
	at        keys.Epoch // of the commit that made it the holder, or the lock free; zero if nothing is known
}

// lockWaiter is a request. Its channel holds a token if it must look again.
type lockWaiter struct {
	look    chan struct{}
	attempt attempt // zero of observers
}

func (w *lockWaiter) signal() {
	select {
	case w.look <- struct{}{}:
	default:
	}
}

// free reports whether the lock may be free.
func (q *lockQueue) free() bool { return q.holder.Token == 0 }

// wakeFirst wakes the waiter whose turn it is, if it may acquire the lock.
func (q *lockQueue) wakeFirst() {
	if len(q.waiters) > 0 && q.free() {
		q.waiters[0].signal()
	}
}

// wakeOthers wakes the waiters of the holder's lease: they have the lock as well.
func (q *lockQueue) wakeOthers() {
	if q.leases[q.holder.Lease] < 2 { // what has acquired the lock is one of them
		return
	}
	for _, w := range q.waiters {
		if w.attempt.lease == q.holder.Lease {
			w.signal()
		}
	}
}

// wait enters an attempt into the queue of a lock.
func (t *lockTable) wait(name []byte, a attempt) (*lockWaiter, error) {
	return t.join(name, a, func(q *lockQueue, w *lockWaiter) {
		q.waiters = append(q.waiters, w)
		q.leases[a.lease]++
	})
}

// observe enters a request among the observers of a lock.
func (t *lockTable) observe(name []byte) (*lockWaiter, error) {
	return t.join(name, attempt{}, func(q *lockQueue, w *lockWaiter) { q.observers[w] = struct{}{} })
}

func (t *lockTable) join(name []byte, a attempt, enter func(*lockQueue, *lockWaiter)) (*lockWaiter, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.count >= t.max {
		return nil, ErrWaiters
	}
	q := t.queues[string(name)]
	if q == nil {
		q = &lockQueue{leases: map[ID]int{}, observers: map[*lockWaiter]struct{}{}}
		t.queues[string(name)] = q
	}
	w := &lockWaiter{look: make(chan struct{}, 1), attempt: a}
	enter(q, w)
	t.count++
	return w, nil
}

// leave removes a request. If it was its turn, it is now that of the next one in the queue.
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
	if q.leases[w.attempt.lease]--; q.leases[w.attempt.lease] == 0 {
		delete(q.leases, w.attempt.lease)
	}
	for i := range q.waiters {
		if q.waiters[i] == w {
			q.waiters = append(q.waiters[:i], q.waiters[i+1:]...)
			if i == 0 {
				q.wakeFirst()
			}
			break
		}
	}
}

// first reports whether it is a waiter's turn.
func (t *lockTable) first(name []byte, w *lockWaiter) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.queues[string(name)].waiters[0] == w
}

// changed notes the holder that a commit at an epoch has made, none if it made the lock free, and wakes what that concerns. Calls may
// come in another order than the commits.
func (t *lockTable) changed(name []byte, holder Held, at keys.Epoch) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[string(name)]
	if q == nil || at <= q.at {
		return
	}
	q.holder, q.at = holder, at
	q.wakeFirst()
	q.wakeOthers()
	for w := range q.observers {
		w.signal()
	}
}

// holder is the newest holder that is known, and the epoch since when.
func (t *lockTable) holder(name []byte) (Held, keys.Epoch) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[string(name)]
	return q.holder, q.at
}

// undo remembers attempts of a lease as undone, and wakes those that wait.
func (t *lockTable) undo(name []byte, lease ID, numbers []uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, number := range numbers {
		t.rememberLocked(attempt{lease, number})
	}
	q := t.queues[string(name)]
	if q == nil || q.leases[lease] == 0 {
		return
	}
	for _, w := range q.waiters {
		if w.attempt.lease == lease && slices.Contains(numbers, w.attempt.number) {
			w.signal()
		}
	}
}

// rememberLocked remembers an attempt as undone, and forgets the oldest one if there are too many.
func (t *lockTable) rememberLocked(a attempt) {
	if t.undone == nil {
		t.undone = map[attempt]struct{}{}
	}
	if _, twice := t.undone[a]; twice {
		return
	}
	t.undone[a] = struct{}{}
	if len(t.undoneOrder) < undoneMax {
		t.undoneOrder = append(t.undoneOrder, a)
		return
	}
	delete(t.undone, t.undoneOrder[t.undoneNext])
	t.undoneOrder[t.undoneNext] = a
	t.undoneNext = (t.undoneNext + 1) % undoneMax
}

// isUndone reports whether an attempt was undone before it was executed.
func (t *lockTable) isUndone(a attempt) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, gone := t.undone[a]
	return gone
}

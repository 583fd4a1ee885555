package lease

import (
	"sync"

	"github.com/epochkv/epochkv/internal/keys"
)

// lockTable has the requests that wait for locks, those that observe them, and the attempts that were undone.
type lockTable struct {
	mu     sync.Mutex
	queues map[string]*lockQueue
	count  int // of waiters and observers
	max    int

	undone      map[uint64]struct{}
	undoneOrder []uint64 // the same, as a ring
	undoneNext  int
}

// undoneMax bounds the attempts that are remembered as undone. A request can be so much later than the one that undoes it only
// if its connection is broken, and the server has not noticed.
const undoneMax = 1 << 16

// lockQueue is what waits for one lock, and what is known of its holder. It exists while something waits for the lock, or observes
// it, so that a change wakes only what it concerns: the first waiter when the lock is free, and observers with what they yield.
type lockQueue struct {
	waiters   []*lockWaiter // the first one may acquire the lock
	observers map[*lockWaiter]struct{}
	holder    Held
	at        keys.Epoch // of the commit that made it the holder, or the lock free; zero if nothing is known
}

// lockWaiter is a request. Its channel holds a token if it must look again.
type lockWaiter struct {
	look    chan struct{}
	attempt uint64
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

// join enters a request into the queue of a lock, or among its observers.
func (t *lockTable) join(name []byte, attempt uint64, observes bool) (*lockWaiter, error) {
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
	w := &lockWaiter{look: make(chan struct{}, 1), attempt: attempt}
	if observes {
		q.observers[w] = struct{}{}
	} else {
		q.waiters = append(q.waiters, w)
	}
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

// undo remembers attempts as undone, and wakes those that wait.
func (t *lockTable) undo(name []byte, attempts []uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.undone == nil {
		t.undone = map[uint64]struct{}{}
	}
	for _, attempt := range attempts {
		if _, twice := t.undone[attempt]; twice {
			continue
		}
		t.undone[attempt] = struct{}{}
		if len(t.undoneOrder) < undoneMax {
			t.undoneOrder = append(t.undoneOrder, attempt)
			continue
		}
		delete(t.undone, t.undoneOrder[t.undoneNext])
		t.undoneOrder[t.undoneNext] = attempt
		t.undoneNext = (t.undoneNext + 1) % undoneMax
	}
	if q := t.queues[string(name)]; q != nil {
		for _, w := range q.waiters {
			if _, gone := t.undone[w.attempt]; gone {
				w.signal()
			}
		}
	}
}

// isUndone reports whether an attempt was undone before it was executed.
func (t *lockTable) isUndone(attempt uint64) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, gone := t.undone[attempt]
	return gone
}

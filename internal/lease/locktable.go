package lease

import (
	"container/list"
	"sync"

	"github.com/epochkv/epochkv/internal/keys"
)

// lockTable has the requests that wait for locks, those that observe them, and the attempts that were undone.
type lockTable struct {
	mu      sync.Mutex
	queues  map[string]*lockQueue
	count   int            // of waiters and observers
	clients map[string]int // those of each client
	max     int

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
// holder, and observers with what they yield. All locks have one mutex, so nothing here walks over waiters that it does not wake.
type lockQueue struct {
	waiters   list.List          // of *lockWaiter; the first one may acquire the lock
	leases    waitersOf[ID]      // those of each lease
	attempts  waitersOf[attempt] // those of each attempt, until it is undone
	observers map[*lockWaiter]struct{}
	holder    Held
	at        keys.Epoch // of the commit that made it the holder, or the lock free; zero if nothing is known
}

// lockWaiter is a request. Its channel holds a token if it must look again.
type lockWaiter struct {
	look    chan struct{}
	attempt attempt // zero of observers
	client  string  // that has the place
	undone  bool    // of lockTable.mu

	inQueue, inLease, inAttempt *list.Element
}

// waitersOf are the waiters of a queue that have something in common.
type waitersOf[K comparable] map[K]*list.List

func (s waitersOf[K]) add(k K, w *lockWaiter) *list.Element {
	if s[k] == nil {
		s[k] = list.New()
	}
	return s[k].PushBack(w)
}

// remove does nothing if the waiter is not among them any more.
func (s waitersOf[K]) remove(k K, at *list.Element) {
	l := s[k]
	if l == nil {
		return
	}
	if l.Remove(at); l.Len() == 0 {
		delete(s, k)
	}
}

func (s waitersOf[K]) signal(k K) {
	l := s[k]
	if l == nil {
		return
	}
	for at := l.Front(); at != nil; at = at.Next() {
		waiterAt(at).signal()
	}
}

func waiterAt(at *list.Element) *lockWaiter { return at.Value.(*lockWaiter) } //nolint:forcetypeassert // the lists have nothing else

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
	if at := q.waiters.Front(); at != nil && q.free() {
		waiterAt(at).signal()
	}
}

// wakeOthers wakes the waiters of the holder's lease: they have the lock as well.
func (q *lockQueue) wakeOthers() { q.leases.signal(q.holder.Lease) }

// wait enters an attempt of a client into the queue of a lock.
func (t *lockTable) wait(client string, name []byte, a attempt) (*lockWaiter, error) {
	return t.join(client, name, a, func(q *lockQueue, w *lockWaiter) {
		w.inQueue, w.inLease, w.inAttempt = q.waiters.PushBack(w), q.leases.add(a.lease, w), q.attempts.add(a, w)
	})
}

// observe enters a request of a client among the observers of a lock.
func (t *lockTable) observe(client string, name []byte) (*lockWaiter, error) {
	return t.join(client, name, attempt{}, func(q *lockQueue, w *lockWaiter) { q.observers[w] = struct{}{} })
}

func (t *lockTable) join(client string, name []byte, a attempt, enter func(*lockQueue, *lockWaiter)) (*lockWaiter, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.leavesLocked(client) {
		return nil, ErrWaiters
	}
	q := t.queues[string(name)]
	if q == nil {
		q = &lockQueue{leases: waitersOf[ID]{}, attempts: waitersOf[attempt]{}, observers: map[*lockWaiter]struct{}{}}
		t.queues[string(name)] = q
	}
	w := &lockWaiter{look: make(chan struct{}, 1), attempt: a, client: client}
	enter(q, w)
	t.count++
	t.clients[client]++
	return w, nil
}

// leavesLocked reports whether there is a place for one more request of a client. It leaves as many free as it then has, but for its only one.
func (t *lockTable) leavesLocked(client string) bool {
	free, has := t.max-t.count-1, t.clients[client]+1
	return free >= 0 && (client == "" || has == 1 || has <= free)
}

// leave removes a request. If it was its turn, it is now that of the next one in the queue.
func (t *lockTable) leave(name []byte, w *lockWaiter) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[string(name)]
	t.count--
	if t.clients[w.client]--; t.clients[w.client] == 0 {
		delete(t.clients, w.client)
	}
	if _, observes := q.observers[w]; observes {
		delete(q.observers, w)
	} else {
		q.remove(w)
	}
	if q.waiters.Len()+len(q.observers) == 0 {
		delete(t.queues, string(name))
	}
}

func (q *lockQueue) remove(w *lockWaiter) {
	first := q.waiters.Front() == w.inQueue
	q.waiters.Remove(w.inQueue)
	q.leases.remove(w.attempt.lease, w.inLease)
	q.attempts.remove(w.attempt, w.inAttempt)
	if first {
		q.wakeFirst()
	}
}

// first reports whether it is a waiter's turn.
func (t *lockTable) first(name []byte, w *lockWaiter) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.queues[string(name)].waiters.Front() == w.inQueue
}

// waits reports whether an attempt waits for a lock.
func (t *lockTable) waits(name []byte) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[string(name)]
	return q != nil && q.waiters.Len() > 0
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

// undo remembers attempts of a lease as undone, and wakes those that wait. They are woken once: what looks finds that it is undone.
func (t *lockTable) undo(name []byte, lease ID, numbers []uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[string(name)]
	for _, number := range numbers {
		a := attempt{lease, number}
		t.rememberLocked(a)
		if q == nil || q.attempts[a] == nil {
			continue
		}
		for at := q.attempts[a].Front(); at != nil; at = at.Next() {
			waiterAt(at).undone = true
		}
		q.attempts.signal(a)
		delete(q.attempts, a)
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
func (t *lockTable) isUndone(w *lockWaiter) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, gone := t.undone[w.attempt]
	return gone || w.undone
}

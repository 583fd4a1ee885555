package mvcc

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// latch is a mutex whose waiters can give up: a request whose deadline has passed must not stay in
// the queue of a latch that a stuck commit holds. Like sync.Mutex it lets a running goroutine take
// it before a parked one, and hands it over to a waiter that has been overtaken for too long.
//
// Invariants: the queue is not empty only while latchWanted is set; latchWoken is set from the
// moment at which a waiter is removed from the queue to try to take the latch until it has tried,
// so that a burst of unlocks wakes one waiter and not all of them.
type latch struct {
	state  atomic.Uint32
	newest keys.Epoch // guarded by the latch

	mu          sync.Mutex // guards the queue and changes of latchWanted and latchWoken
	first, last *waiter
}

const (
	latchHeld   uint32 = 1 << iota
	latchWanted        // there is a queue: unlock has to serve it
	latchWoken         // a woken waiter will take the latch, or its holder serves the queue
)

// A waiter that was woken and found the latch taken is handed the latch if it has waited for
// overtakenMax; a waiter that was not woken, if it has waited for queuedMax. Without queuedMax each
// waiter costs a time slice of the scheduler, in which the goroutine before it overtakes the
// others: 64 writers of one key waited for seconds. Handing over at every unlock costs a context
// switch for each commit and leaves a tenth of the throughput or less. With the two bounds all
// waiters that have waited for long get the latch in turn, and then there is no queue for a while.
const (
	overtakenMax = time.Millisecond
	queuedMax    = 20 * time.Millisecond
)

func (l *latch) tryLock() bool {
	s := l.state.Load()
	return s&latchHeld == 0 && l.state.CompareAndSwap(s, s|latchHeld)
}

// lock takes the latch, or returns why the context ended. A commit holds a latch for a few hundred
// nanoseconds, so lock first tries again and again, after some 40 ns each; then it parks on w.
func (l *latch) lock(ctx context.Context, w *waiter) error {
	if l.state.CompareAndSwap(0, latchHeld) || l.spin() {
		return nil
	}
	w.since = time.Now()
	err := l.lockParked(ctx, w)
	w.waited += time.Since(w.since)
	return err
}

// lockParked is lock for a waiter that parks until the latch is free, or handed to it.
func (l *latch) lockParked(ctx context.Context, w *waiter) error {
	w.starving = w.urgent
	for again := w.urgent; l.enqueue(w, again); again = true {
		select {
		case <-w.wake:
		case <-ctx.Done():
			l.cancel(w)
			return context.Cause(ctx)
		}
		if w.granted {
			return nil
		}
		l.arrive()
		if l.spin() {
			return nil
		}
		w.starving = w.urgent || time.Since(w.since) > overtakenMax
	}
	return nil
}

func (l *latch) spin() bool {
	for range spins {
		if l.tryLock() {
			return true
		}
		pause(pausesPerSpin)
	}
	return false
}

// enqueue puts w into the queue, at its head if w has waited before or is urgent. If the latch is
// free, it takes the latch instead and returns false. latchWanted is set before that last try: the
// holder either leaves the latch free for it, or sees the bit and then the queue.
func (l *latch) enqueue(w *waiter, front bool) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.state.Or(latchWanted)
	if l.tryLock() {
		l.clearWantedLocked()
		return false
	}
	w.granted = false
	switch {
	case l.first == nil:
		w.next, l.first, l.last = nil, w, w
	case front:
		w.next, l.first = l.first, w
	default:
		w.next, l.last.next, l.last = nil, w, w
	}
	return true
}

// arrive ends the time in which unlocks rely on the waiter that was woken.
func (l *latch) arrive() { l.state.And(^latchWoken) }

func (l *latch) unlock() {
	if !l.state.CompareAndSwap(latchHeld, 0) {
		l.unlockWanted()
	}
}

func (l *latch) unlockWanted() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.first; w != nil && (w.starving || time.Since(w.since) > queuedMax) {
		l.popLocked()
		w.granted = true // latchHeld stays set: the latch now belongs to the waiter
		w.wake <- struct{}{}
		return
	}
	l.state.And(^latchHeld)
	l.wakeLocked()
}

// wakeLocked wakes the first waiter to try, unless a woken waiter has not tried yet.
func (l *latch) wakeLocked() {
	if w := l.first; w != nil && l.state.Load()&latchWoken == 0 {
		l.popLocked()
		l.state.Or(latchWoken)
		w.wake <- struct{}{}
	}
}

func (l *latch) popLocked() {
	w := l.first
	if l.first = w.next; l.first == nil {
		l.last = nil
	}
	w.next = nil
	l.clearWantedLocked()
}

func (l *latch) clearWantedLocked() {
	if l.first == nil {
		l.state.And(^latchWanted)
	}
}

// cancel removes w from the queue. If w was woken at the same moment, the latch or the wake-up is
// passed on to the next waiter, and the channel of w is empty afterwards.
func (l *latch) cancel(w *waiter) {
	l.mu.Lock()
	if l.removeLocked(w) {
		l.mu.Unlock()
		return
	}
	<-w.wake // the token was sent before the queue was unlocked
	if w.granted {
		l.mu.Unlock()
		l.unlock()
		return
	}
	l.arrive()
	if l.state.Load()&latchHeld == 0 { // otherwise the holder serves the queue
		l.wakeLocked()
	}
	l.mu.Unlock()
}

func (l *latch) removeLocked(w *waiter) bool {
	var before *waiter
	for p := l.first; p != nil; before, p = p, p.next {
		if p != w {
			continue
		}
		if before == nil {
			l.first = w.next
		} else {
			before.next = w.next
		}
		if l.last == w {
			l.last = before
		}
		w.next = nil
		l.clearWantedLocked()
		return true
	}
	return false
}

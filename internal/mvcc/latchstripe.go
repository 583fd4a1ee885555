package mvcc

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// latch is a mutex whose waiters can give up: a client whose deadline has passed must not stay in a queue that a stuck commit holds up.
// Like sync.Mutex it lets a running goroutine take it ahead of a parked one, and hands it over once a waiter has been overtaken for too
// long.
//
// Invariants: the queue is not empty only while latchWanted is set; latchWoken is set from the moment a waiter is taken off the queue to try
// its luck until it has tried, so that a burst of unlocks wakes one waiter and not all of them.
type latch struct {
	state  atomic.Uint32
	newest keys.Epoch // guarded by the latch

	mu          sync.Mutex // guards the queue and changes of latchWanted and latchWoken
	first, last *waiter
	_           [24]byte
}

const (
	latchHeld   uint32 = 1 << iota
	latchWanted        // there is a queue: unlock has to look at it
	latchWoken         // a waiter is on its way and will take the latch or see to the next one
)

// A waiter that was woken and lost is handed the latch if it has waited for overtakenMax; one that was not woken, if it has for queuedMax. Without
// the latter each waiter costs a time slice of the scheduler, in which the goroutine before it overtakes the others: 64 writers of one key
// waited for seconds. Handing over every time costs a switch for each commit, a tenth of the throughput or less would be left; like this all who have
// waited for long get the latch in turn, and then there is no queue for a while.
const (
	overtakenMax = time.Millisecond
	queuedMax    = 20 * time.Millisecond
)

func (l *latch) tryLock() bool {
	s := l.state.Load()
	return s&latchHeld == 0 && l.state.CompareAndSwap(s, s|latchHeld)
}

// lock takes the latch, or returns why the context ended. It looks again after some 40 ns while the latch is busy, as it is for the time of
// a commit, a few hundred; then it parks on w.
func (l *latch) lock(ctx context.Context, w *waiter) error {
	if l.state.CompareAndSwap(0, latchHeld) || l.spin() {
		return nil
	}
	w.since, w.starving = time.Now(), false
	for again := false; l.enqueue(w, again); again = true {
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
		w.starving = time.Since(w.since) > overtakenMax
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

// enqueue parks w, in front if it has waited before, unless the latch is free, which it then takes. The bit is set before the last try: the
// holder either leaves the latch free for that, or sees the bit and then the queue.
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

// arrive ends the time in which others rely on the waiter that was woken.
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
		w.granted = true // held stays set: the latch is the waiter's
		w.wake <- struct{}{}
		return
	}
	l.state.And(^latchHeld)
	l.wakeLocked()
}

// wakeLocked lets the first waiter try, unless one is on its way.
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

// cancel takes w out of the queue. If it was woken at the same moment, what it was woken for is passed on, and its channel is empty
// afterwards.
func (l *latch) cancel(w *waiter) {
	l.mu.Lock()
	if l.removeLocked(w) {
		l.mu.Unlock()
		return
	}
	<-w.wake // it was sent before the queue was unlocked
	if w.granted {
		l.mu.Unlock()
		l.unlock()
		return
	}
	l.arrive()
	if l.state.Load()&latchHeld == 0 { // else the holder sees to the queue
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

package wal

import (
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// waits is the queue of the goroutines that wait for durable, and the flush role: at any time at most one goroutine writes
// and syncs. A waiter that finds the role free takes it and flushes by itself, so that a lone writer pays no switch. When it
// has what it wanted and others wait, the background goroutine takes the role over and flushes until the queue is empty.
//
// Invariant: every access to a queued waiter, its signal included, happens under mu. A waiter leaves the queue in exactly
// one of two ways: it is settled, which puts one signal into its channel, or its owner takes it out. So when its owner knows
// which of the two happened, nothing else refers to the waiter, and it may be used again.
type waits struct {
	mu          sync.Mutex
	flushing    bool       // the role is taken
	handed      bool       // the role is the background goroutine's, which has not noticed yet
	queue       []*waiter  // in no order; queue[i].place == i
	flushTarget keys.Epoch // flush up to here though no goroutine waits
	newest      keys.Epoch // the largest epoch that was ever waited or asked for
	groupTarget keys.Epoch // not zero: the flusher sleeps until newest is as large as this; see gather
	ended       bool       // the log is closed and flushed: no wait will be granted any more

	wake         chan struct{} // capacity 1: wakes the background goroutine
	groupReached chan struct{} // capacity 1: newest has reached gathered
	pool         sync.Pool     // of *waiter that are in no queue and have no signal
}

// waiter is a goroutine that waits for an epoch to become durable.
type waiter struct {
	signal chan struct{} // capacity 1: the waiter was settled
	epoch  keys.Epoch
	index  int // index in the queue, or unqueued
}

const unqueued = -1

// WaitDurable returns nil when e is durable, ErrFailed when it never will be, or the context's error. e must have been
// reserved by a writer that will publish it. A waiter that flushes by itself looks at its context between two syncs; every
// other one returns as soon as its context ends.
func (l *Log) WaitDurable(ctx context.Context, e keys.Epoch) error {
	if l.Durable() >= e {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err // it must not start a sync for which it will not wait
	}
	w := &l.waits
	w.mu.Lock()
	if err := l.refusal(e); err != nil || l.Durable() >= e {
		w.mu.Unlock()
		return err
	}
	if !w.flushing {
		w.flushing = true
		w.mu.Unlock()
		return l.flushAsLeader(ctx, e)
	}
	waiter := w.push(e)
	w.mu.Unlock()
	return l.await(ctx, waiter, e)
}

func (l *Log) await(ctx context.Context, waiter *waiter, e keys.Epoch) error {
	w := &l.waits
	select {
	case <-waiter.signal:
	case <-ctx.Done():
		if w.leave(waiter) {
			w.pool.Put(waiter)
			return ctx.Err()
		}
		<-waiter.signal // is there already
	}
	w.pool.Put(waiter)
	return l.Result(e)
}

// Flush makes durable everything that is published up to e. It is WaitDurable without a way out.
func (l *Log) Flush(e keys.Epoch) error { return l.WaitDurable(context.Background(), e) }

// RequestFlush asks for e to become durable soon, and does not wait.
func (l *Log) RequestFlush(e keys.Epoch) {
	if l.Durable() >= e {
		return
	}
	w := &l.waits
	w.mu.Lock()
	w.flushTarget = max(w.flushTarget, e)
	w.request(e)
	idle := !w.flushing
	w.mu.Unlock()
	if idle {
		w.wakeBackground()
	}
}

// Result says what became of an epoch that was waited for: nil if it is durable, else why it will not be.
func (l *Log) Result(e keys.Epoch) error {
	if l.Durable() >= e {
		return nil
	}
	if err := l.Err(); err != nil {
		return err
	}
	return ErrClosed
}

// refusal is why nobody should start waiting. The caller holds waits.mu.
func (l *Log) refusal(e keys.Epoch) error {
	if l.closed.Load() || l.Err() != nil {
		return l.Result(e)
	}
	return nil
}

// push queues a waiter for e. The caller holds mu.
func (w *waits) push(e keys.Epoch) *waiter {
	one, ok := w.pool.Get().(*waiter)
	if !ok {
		one = &waiter{signal: make(chan struct{}, 1)}
	}
	one.epoch, one.index = e, len(w.queue)
	w.queue = append(w.queue, one)
	w.request(e)
	return one
}

// leave takes a waiter out of the queue, in constant time, or reports false if it was settled before.
func (w *waits) leave(one *waiter) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if one.index == unqueued {
		return false
	}
	w.removeLocked(one)
	return true
}

func (w *waits) removeLocked(one *waiter) {
	last := len(w.queue) - 1
	moved := w.queue[last]
	w.queue[one.index], moved.index = moved, one.index
	w.queue[last], one.index = nil, unqueued
	w.queue = w.queue[:last]
}

// settleLocked signals the waiters whose wait is over, for better or worse. A signal never blocks: its channel was empty.
func (w *waits) wakeDurableLocked(l *Log) {
	durable := l.Durable()
	over := l.Err() != nil || w.ended
	for i := len(w.queue) - 1; i >= 0; i-- { // what takes the place of a removed one has been looked at
		if one := w.queue[i]; over || one.epoch <= durable {
			w.removeLocked(one)
			one.signal <- struct{}{}
		}
	}
}

// ask notes that somebody wants e, and wakes the flusher if it has slept for that.
func (w *waits) request(e keys.Epoch) {
	w.newest = max(w.newest, e)
	if w.groupTarget > 0 && e >= w.groupTarget {
		w.groupTarget = 0
		w.groupReached <- struct{}{}
	}
}

// beyond is the number of records behind an epoch that somebody wants.
func (w *waits) recordsAfter(e keys.Epoch) int { return int(max(w.newest, e) - e) }

func (w *waits) wakeBackground() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// lead flushes until e is durable or ctx ends. The caller has the flush role, which lead gives up.
func (l *Log) flushAsLeader(ctx context.Context, e keys.Epoch) error {
	var idle backoff
	for {
		moved, err := l.flushStep()
		if err != nil || l.Durable() >= e || !moved && l.closed.Load() {
			break
		}
		if ctx.Err() != nil {
			l.releaseFlusher()
			return ctx.Err()
		}
		if moved {
			idle.reset()
			l.wakeAll()
			continue
		}
		idle.wait() // an earlier epoch is reserved but not yet published
	}
	l.releaseFlusher()
	return l.Result(e)
}

// flushOnce takes the role as soon as it is free, flushes what is copied, and gives it up.
func (l *Log) flushOnce() (moved bool, err error) {
	l.acquireFlusher()
	moved, err = l.flushStep()
	l.releaseFlusher()
	return moved, err
}

// acquireRole waits for the role. One that is handed over but not yet taken is as good as free.
func (l *Log) acquireFlusher() {
	var idle backoff
	for !l.tryFlusher() {
		idle.wait()
	}
}

func (l *Log) tryFlusher() bool {
	l.waits.mu.Lock()
	defer l.waits.mu.Unlock()
	free := !l.waits.flushing || l.waits.handed
	l.waits.flushing, l.waits.handed = true, false
	return free
}

// resign gives up the role: to the background goroutine if there is more to do, else to nobody.
func (l *Log) releaseFlusher() {
	w := &l.waits
	w.mu.Lock()
	w.wakeDurableLocked(l)
	if w.busy(l) {
		w.handed = true
		w.wakeBackground()
	} else {
		w.flushing = false
	}
	w.mu.Unlock()
}

// settleAll signals every waiter whose wait is over.
func (l *Log) wakeAll() {
	l.waits.mu.Lock()
	l.waits.wakeDurableLocked(l)
	l.waits.mu.Unlock()
}

// busy reports whether there is reason to flush further.
func (w *waits) busy(l *Log) bool {
	if l.Err() != nil || l.closed.Load() {
		return false
	}
	return len(w.queue) > 0 || w.flushTarget > l.Durable()
}

// runFlusher flushes for those who wait in the queue, or asked without waiting, until Close.
func (l *Log) runFlusher() {
	defer l.background.Done()
	for {
		select {
		case <-l.stop:
			return
		case <-l.waits.wake:
			if l.waits.takeOver(l) {
				l.flushForAll()
			}
		}
	}
}

// takeOver takes the role if it is handed to the background goroutine, or free and needed.
func (w *waits) takeOver(l *Log) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.handed {
		w.handed = false
		return true
	}
	if w.flushing || !w.busy(l) {
		return false
	}
	w.flushing = true
	return true
}

// flushForAll flushes as long as anybody wants it, and then gives up the role. It keeps the role while those it has just
// woken run: in a closed loop they come back at once, and the next sync takes them all. Giving it up first made the
// fastest of 64 writers sync alone every second time.
func (l *Log) flushForAll() {
	var idle backoff
	var group groupDelay
	w := &l.waits
	for {
		from, start := l.Durable(), time.Now()
		moved, _ := l.flushStep() // waiters read the failure from Err
		if moved {
			idle.reset()
			group.delayNext(l, from, time.Since(start))
			runtime.Gosched()
		} else {
			l.wakeAll()
		}
		w.mu.Lock()
		more := w.busy(l)
		w.flushing = more
		w.mu.Unlock()
		if !more {
			return
		}
		if !moved {
			idle.wait()
		}
	}
}

// backoff waits for a writer that stands between its reservation and its publication: usually nanoseconds, but a
// scheduler's time slice if it was preempted there.
type backoff struct{ rounds int }

func (b *backoff) reset() { b.rounds = 0 }

func (b *backoff) wait() {
	const yields, sleepMax = 64, time.Millisecond
	if b.rounds++; b.rounds <= yields {
		runtime.Gosched()
		return
	}
	time.Sleep(min(time.Duration(b.rounds-yields)*10*time.Microsecond, sleepMax))
}

package wal

import (
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// waits is the queue of the goroutines that wait for durable, and the flush role: at any time at most one
// goroutine writes and syncs. A waiter that finds the role free takes it and flushes itself, so that a single
// writer needs no switch to another goroutine. When its epoch is durable and other goroutines wait, the
// background goroutine takes the role over and flushes until the queue is empty.
//
// Invariant: every access to a queued waiter, also to its signal, happens under mu. A waiter leaves the queue
// in exactly one of two ways: the flusher wakes it, with one signal into its channel, or its owner takes it
// out. So when its owner knows which of the two happened, nothing else refers to the waiter, and it may be
// used again.
type waits struct {
	mu          sync.Mutex
	flushing    bool       // the role is taken
	handed      bool       // the role belongs to the background goroutine, which has not taken it yet
	queue       []*waiter  // in no order; queue[i].index == i
	flushTarget keys.Epoch // flush up to here even if no goroutine waits
	newest      keys.Epoch // the largest epoch that was ever requested, with or without a waiter
	groupTarget keys.Epoch // not zero: the flusher sleeps until newest is as large as this; see groupDelay
	ended       bool       // the log is closed and flushed: every wait ends
	observers   []*waiter  // wait for an epoch and request nothing; they are no reason to flush

	wake         chan struct{} // capacity 1: wakes the background goroutine
	groupReached chan struct{} // capacity 1: newest has reached groupTarget
	pool         sync.Pool     // of *waiter that are not in the queue and have no signal
}

// waiter is a goroutine that waits for an epoch to become durable.
type waiter struct {
	signal chan struct{} // capacity 1: the flusher has woken the waiter
	epoch  keys.Epoch
	index  int // index in the queue, or unqueued
}

const unqueued = -1

// WaitDurable returns nil when e is durable, ErrFailed when it never will be, or the context's error. e must
// have been reserved by a writer that will publish it. A waiter that flushes itself checks its context
// between two syncs; every other waiter returns as soon as its context ends.
func (l *Log) WaitDurable(ctx context.Context, e keys.Epoch) error {
	if l.Durable() >= e {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err // it must not start a sync whose end it will not await
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
		<-waiter.signal // was sent before leave returned
	}
	w.pool.Put(waiter)
	return l.Result(e)
}

// Flush makes everything up to e durable. It is WaitDurable without a context.
func (l *Log) Flush(e keys.Epoch) error { return l.WaitDurable(context.Background(), e) }

// RequestFlush requests that e becomes durable soon, and does not wait.
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

// Result is the result of a wait for an epoch: nil if it is durable, otherwise the reason why it never will be.
func (l *Log) Result(e keys.Epoch) error {
	if l.Durable() >= e {
		return nil
	}
	if err := l.Err(); err != nil {
		return err
	}
	return ErrClosed
}

// refusal is why no goroutine may start to wait. The caller holds waits.mu.
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

// leave takes a waiter out of the queue, in constant time, or reports false if it was woken before.
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

// wakeDurableLocked wakes the waiters whose epochs are durable, or never will be. A signal never blocks: its
// channel was empty.
func (w *waits) wakeDurableLocked(l *Log) {
	durable := l.Durable()
	over := l.Err() != nil || w.ended
	for i := len(w.queue) - 1; i >= 0; i-- { // the waiter that moves to index i has been checked
		if one := w.queue[i]; over || one.epoch <= durable {
			w.removeLocked(one)
			one.signal <- struct{}{}
		}
	}
	if len(w.observers) > 0 {
		w.wakeObserversLocked(durable, over)
	}
	if invariants.Enabled {
		w.assertQueueLocked(durable)
	}
}

// request records that e is requested, and wakes the flusher if e completes the group for which it sleeps.
func (w *waits) request(e keys.Epoch) {
	w.newest = max(w.newest, e)
	if w.groupTarget > 0 && e >= w.groupTarget {
		w.groupTarget = 0
		w.groupReached <- struct{}{}
	}
}

// recordsAfter is the number of requested records after an epoch.
func (w *waits) recordsAfter(e keys.Epoch) int { return int(max(w.newest, e) - e) }

func (w *waits) wakeBackground() {
	select {
	case w.wake <- struct{}{}:
	default:
	}
}

// flushAsLeader flushes until e is durable or ctx ends. The caller holds the flush role, which flushAsLeader
// releases.
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

// tryFlush flushes the copied records, if the role is free.
func (l *Log) tryFlush() (moved bool, err error) {
	if !l.tryFlusher() {
		return false, nil
	}
	moved, err = l.flushStep()
	l.releaseFlusher()
	return moved, err
}

// acquireFlusher waits for the flush role. A role that is handed over but not yet taken counts as free.
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

// releaseFlusher hands the flush role to the background goroutine if there is more to flush; otherwise the role
// is free.
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

// wakeAll wakes every waiter whose epoch is durable, or never will be.
func (l *Log) wakeAll() {
	l.waits.mu.Lock()
	l.waits.wakeDurableLocked(l)
	l.waits.mu.Unlock()
}

// busy reports whether there is more to flush.
func (w *waits) busy(l *Log) bool {
	if l.Err() != nil || l.closed.Load() {
		return false
	}
	return len(w.queue) > 0 || w.flushTarget > l.Durable()
}

// runFlusher flushes for the waiters in the queue, and up to requested epochs, until Close.
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

// flushForAll flushes while there are requests, and then releases the role. It keeps the role while the waiters
// that it has just woken run: writers in a closed loop come back at once, and the next sync serves all of them.
// When it released the role first, the fastest of 64 writers synced alone every second time.
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

// backoff waits for a writer that is between its reservation and its publication: usually nanoseconds, but a
// scheduler's time slice if the writer was preempted there.
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

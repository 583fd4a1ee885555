package wal

import (
	"context"
	"runtime"
	"sync"
	"time"

	"epochkv/internal/storage/keys"
)

// waits is the queue of who waits for durable, and the flush role: at any time at most one goroutine writes and syncs. A
// waiter that finds the role free takes it and flushes by itself, so that a lone writer pays no switch. When it has
// what it wanted and others wait, the background goroutine takes the role over and flushes until the queue is empty.
type waits struct {
	mu       sync.Mutex
	flushing bool       // somebody has the role
	handed   bool       // the role is the background goroutine's, which has not noticed yet
	queue    *Waiter    // in no order
	want     keys.Epoch // flush up to here though nobody waits
	newest   keys.Epoch // the largest epoch that was ever waited or asked for
	gathered keys.Epoch // not zero: the flusher sleeps until newest is as large as this; see gather
	ended    bool       // the log is closed and flushed: nobody's wait will be granted any more

	kick    chan struct{} // capacity 1: wakes the background goroutine
	company chan struct{} // capacity 1: newest has reached gathered
}

// Waiter is told when an epoch has become durable, or never will. It is for one registration at a time, and may be
// used again after it was woken.
type Waiter struct {
	// C receives once for every registration that Notify accepted.
	C     chan struct{}
	epoch keys.Epoch
	next  *Waiter
}

// NewWaiter makes a waiter.
func NewWaiter() *Waiter { return &Waiter{C: make(chan struct{}, 1)} }

var waiterPool = sync.Pool{New: func() any { return NewWaiter() }}

// WaitDurable returns nil when e is durable, ErrFailed when it never will be, or the context's error. e must have been
// reserved by somebody who will publish it.
func (l *Log) WaitDurable(ctx context.Context, e keys.Epoch) error {
	if l.Durable() >= e {
		return nil
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
		return l.lead(ctx, e)
	}
	waiter := waiterPool.Get().(*Waiter)
	w.push(waiter, e)
	w.mu.Unlock()
	return l.await(ctx, waiter, e)
}

func (l *Log) await(ctx context.Context, waiter *Waiter, e keys.Epoch) error {
	select {
	case <-waiter.C:
		waiterPool.Put(waiter)
		return l.Result(e)
	case <-ctx.Done():
		l.Forget(waiter)
		waiterPool.Put(waiter)
		return ctx.Err()
	}
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
	w.want = max(w.want, e)
	w.ask(e)
	idle := !w.flushing
	w.mu.Unlock()
	if idle {
		w.wakeBackground()
	}
}

// Notify registers waiter for e, or reports true if there is nothing to wait for: see Result. The background goroutine
// flushes; nothing blocks and nothing is allocated.
func (l *Log) Notify(waiter *Waiter, e keys.Epoch) (settled bool) {
	if l.Durable() >= e {
		return true
	}
	w := &l.waits
	w.mu.Lock()
	if l.refusal(e) != nil || l.Durable() >= e {
		w.mu.Unlock()
		return true
	}
	w.push(waiter, e)
	idle := !w.flushing
	w.mu.Unlock()
	if idle {
		w.wakeBackground()
	}
	return false
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

// Forget takes waiter back, whether or not it was woken meanwhile. Its channel is empty afterwards.
func (l *Log) Forget(waiter *Waiter) {
	l.waits.mu.Lock()
	for p := &l.waits.queue; *p != nil; p = &(*p).next {
		if *p == waiter {
			*p = waiter.next
			waiter.next = nil
			break
		}
	}
	l.waits.mu.Unlock()
	select {
	case <-waiter.C:
	default:
	}
}

// refusal is why nobody should start waiting. The caller holds waits.mu.
func (l *Log) refusal(e keys.Epoch) error {
	if l.closed.Load() || l.Err() != nil {
		return l.Result(e)
	}
	return nil
}

func (w *waits) push(waiter *Waiter, e keys.Epoch) {
	waiter.epoch, waiter.next = e, w.queue
	w.queue = waiter
	w.ask(e)
}

// ask notes that somebody wants e, and wakes the flusher if it has slept for that.
func (w *waits) ask(e keys.Epoch) {
	w.newest = max(w.newest, e)
	if w.gathered > 0 && e >= w.gathered {
		w.gathered = 0
		w.company <- struct{}{}
	}
}

// beyond is the number of records behind an epoch that somebody wants.
func (w *waits) beyond(e keys.Epoch) int { return int(max(w.newest, e) - e) }

func (w *waits) wakeBackground() {
	select {
	case w.kick <- struct{}{}:
	default:
	}
}

// lead flushes until e is durable. The caller has the flush role, which lead gives up.
func (l *Log) lead(ctx context.Context, e keys.Epoch) error {
	var idle backoff
	for l.Durable() < e {
		moved, err := l.flushStep()
		if err != nil {
			break
		}
		if l.Durable() >= e {
			break
		}
		if moved {
			idle.reset()
			l.wakeSettled()
			continue
		}
		if l.closed.Load() {
			break
		}
		if ctx.Err() != nil {
			l.resign()
			return ctx.Err()
		}
		idle.wait() // an earlier epoch is reserved but not yet published
	}
	l.resign()
	return l.Result(e)
}

// flushOnce takes the role as soon as it is free, flushes what is copied, and gives it up.
func (l *Log) flushOnce() error {
	l.acquireRole()
	moved, err := l.flushStep()
	l.resign()
	if !moved && err == nil {
		runtime.Gosched()
	}
	return err
}

// acquireRole waits for the role. One that is handed over but not yet taken is as good as free.
func (l *Log) acquireRole() {
	var idle backoff
	for !l.tryRole() {
		idle.wait()
	}
}

func (l *Log) tryRole() bool {
	l.waits.mu.Lock()
	defer l.waits.mu.Unlock()
	free := !l.waits.flushing || l.waits.handed
	l.waits.flushing, l.waits.handed = true, false
	return free
}

// resign gives up the role: to the background goroutine if there is more to do, else to nobody.
func (l *Log) resign() {
	w := &l.waits
	w.mu.Lock()
	woken := w.takeSettled(l)
	if w.busy(l) {
		w.handed = true
		w.wakeBackground()
	} else {
		w.flushing = false
	}
	w.mu.Unlock()
	wake(woken)
}

// wakeSettled wakes whoever has what it waited for. The caller keeps the role.
func (l *Log) wakeSettled() {
	l.waits.mu.Lock()
	woken := l.waits.takeSettled(l)
	l.waits.mu.Unlock()
	wake(woken)
}

// takeSettled unlinks the waiters whose wait is over, for better or worse.
func (w *waits) takeSettled(l *Log) (woken *Waiter) {
	durable := l.Durable()
	over := l.Err() != nil || w.ended
	for p := &w.queue; *p != nil; {
		waiter := *p
		if !over && waiter.epoch > durable {
			p = &waiter.next
			continue
		}
		*p = waiter.next
		waiter.next = woken
		woken = waiter
	}
	return woken
}

// wake signals a list of waiters. A waiter may be used again, and linked elsewhere, as soon as it is signalled.
func wake(list *Waiter) {
	for list != nil {
		waiter := list
		list = waiter.next
		waiter.next = nil
		waiter.C <- struct{}{}
	}
}

// busy reports whether there is reason to flush further.
func (w *waits) busy(l *Log) bool {
	if l.Err() != nil || l.closed.Load() {
		return false
	}
	return w.queue != nil || w.want > l.Durable()
}

// runFlusher flushes for those who wait in the queue, or asked without waiting, until Close.
func (l *Log) runFlusher() {
	defer l.background.Done()
	for {
		select {
		case <-l.stop:
			return
		case <-l.waits.kick:
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
	var group gather
	w := &l.waits
	for {
		from, start := l.Durable(), time.Now()
		moved, _ := l.flushStep() // waiters read the failure from Err
		if moved {
			idle.reset()
			group.settle(l, from, time.Since(start))
			runtime.Gosched()
		} else {
			l.wakeSettled()
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

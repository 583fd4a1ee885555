package mvcc

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// watermark is the visibility watermark: it knows which epochs are installed in the memtable, and moves visible over
// every consecutive one.
//
// A writer marks its epoch in a ring and then advances visible: the writer that finishes last moves visible for all.
// A session may reserve an epoch while its previous one is at most epochsAheadMax after visible. So all epochs of a
// session but the newest are at most epochsAheadMax after visible. Every epoch beyond that is the newest one of a
// session, and there are at most as many of them as there are sessions:
//
//	visible ── epochsAheadMax ──► one epoch for each session ──► end of the ring
//
// The ring is for writers that finish out of order. A writer that finds visible one before its epoch moves visible over
// its own epoch without a mark: no other writer can, and so writers that finish in order share one cache line and not
// two.
//
// Invariant: every epoch <= visible is installed, and every marked epoch is <= visible + len(ring).
type watermark struct {
	_       [128]byte
	visible atomic.Uint64
	_       [120]byte

	ring []atomic.Uint64 // ring[slot(e)] == e once e is installed out of turn
	mask uint64

	_       [128]byte
	parked  atomic.Int32 // waiters in the list; writers look at it after they have moved visible
	_       [124]byte
	mu      sync.Mutex
	waiting []*waiter
	alone   sync.Pool // of *waiter, for waits without a session; of this store, because channels of one synctest bubble are of no use in another

	failed  chan struct{} // closed once an epoch will never be installed: visible stays below it
	failure error         // why; constant from then on
	once    sync.Once
}

// waiter is what a session parks on, in one queue at a time. Its channel holds one token, so that waking never blocks.
type waiter struct {
	wake   chan struct{}
	epoch  uint64        // in the list of the watermark
	waited time.Duration // parked for other commits, since Session.TakeWaits

	next     *waiter   // in a latch's queue
	since    time.Time // when it came there first
	starving bool      // it was woken, and overtaken for too long
	urgent   bool      // it is the first in a latch's queue, and gets the latch at the next unlock
	granted  bool      // the latch has been handed over; guarded by the latch's queue
}

func newWaiter() *waiter { return &waiter{wake: make(chan struct{}, 1)} }

// open prepares the ring for the epochs of at most sessionsMax sessions beyond visible.
func (h *watermark) open(visible keys.Epoch, sessionsMax int) {
	size := uint64(64)
	for size <= uint64(sessionsMax+epochsAheadMax) {
		size *= 2
	}
	h.ring = make([]atomic.Uint64, size)
	h.mask = size - 1
	h.visible.Store(uint64(visible))
	h.failed = make(chan struct{})
}

// fail ends every wait for an epoch that visible has not reached, now and later, because one before it will never be installed.
func (h *watermark) fail(err error) {
	h.once.Do(func() {
		h.failure = err
		close(h.failed)
	})
}

// ringEntry spreads neighbouring epochs over cache lines: two writers finish neighbouring epochs at the same moment.
func (h *watermark) ringEntry(e uint64) *atomic.Uint64 {
	lines := (h.mask + 1) / 8
	return &h.ring[(e%lines)*8+(e/lines)%8]
}

// markInstalled says that e is installed, and moves visible as far as possible. A writer that marks an epoch looks at
// visible afterwards, and a writer that moves visible looks for a mark afterwards: one of two neighbours sees the other.
func (h *watermark) markInstalled(e keys.Epoch) {
	own := uint64(e)
	if invariants.Enabled {
		h.assertInstallable(own)
	}
	moved := h.visible.CompareAndSwap(own-1, own) // not a load first: that would fetch a contended line twice
	if !moved {
		h.ringEntry(own).Store(own)
	}
	h.advance(moved)
}

// jumpTo moves visible to e, past epochs that no commit has or will get. Every epoch that was given out is visible already.
func (h *watermark) jumpTo(e keys.Epoch) {
	if before := h.visible.Load(); invariants.Enabled && before > uint64(e) {
		invariants.Fail("visible decreases from %d to %d", before, e)
	}
	h.visible.Store(uint64(e))
	h.advance(true)
}

func (h *watermark) advance(moved bool) {
	for {
		from := h.visible.Load()
		to := from
		for h.ringEntry(to+1).Load() == to+1 {
			to++
		}
		if to == from {
			break
		}
		moved = h.visible.CompareAndSwap(from, to) || moved
	}
	if moved && h.parked.Load() != 0 {
		h.wakeThrough(h.visible.Load())
	}
}

func (h *watermark) wakeThrough(epoch uint64) {
	h.mu.Lock()
	kept := h.waiting[:0]
	for _, w := range h.waiting {
		if w.epoch > epoch {
			kept = append(kept, w)
			continue
		}
		h.parked.Add(-1)
		w.wake <- struct{}{}
	}
	h.waiting = kept
	h.mu.Unlock()
}

// spins bounds the busy wait at a few microseconds: a commit in the window takes less than one, unless its goroutine
// was descheduled, and then only parking helps.
const (
	spins         = 24
	pausesPerSpin = 2
)

// wait returns once visible has reached e, the context has ended, or an epoch before e will never be installed. Every
// smaller epoch is completed by the commit that reserved it.
func (h *watermark) wait(ctx context.Context, e keys.Epoch, w *waiter) (err error) {
	if invariants.Enabled && e > keys.MaxEpoch {
		invariants.Fail("a wait for epoch %d, which no commit can have", e)
	}
	if h.spin(e) || !h.enqueue(uint64(e), w) {
		return nil
	}
	parked := time.Now()
	defer func() { w.waited += time.Since(parked) }()
	select {
	case <-w.wake:
		return nil
	case <-ctx.Done():
		err = context.Cause(ctx)
	case <-h.failed:
		err = h.failure
	}
	if h.dequeue(w) {
		return err
	}
	<-w.wake // it was sent before the list was unlocked
	return nil
}

// spin waits busily, for a few microseconds at most, and reports whether visible has reached e.
func (h *watermark) spin(e keys.Epoch) bool {
	for range spins {
		if h.visible.Load() >= uint64(e) {
			return true
		}
		pause(pausesPerSpin)
	}
	return false
}

// waitAlone is wait without a session.
func (h *watermark) waitAlone(ctx context.Context, e keys.Epoch) error {
	if h.visible.Load() >= uint64(e) {
		return nil
	}
	w, pooled := h.alone.Get().(*waiter)
	if !pooled {
		w = newWaiter()
	}
	defer h.alone.Put(w)
	return h.wait(ctx, e, w)
}

// enqueue adds w to the waiters, unless visible has reached e. It increments the counter before it reads visible again,
// and advance moves visible before it reads the counter: one of the two sees the other.
func (h *watermark) enqueue(e uint64, w *waiter) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.parked.Add(1)
	if h.visible.Load() >= e {
		h.parked.Add(-1)
		return false
	}
	w.epoch = e
	h.waiting = append(h.waiting, w)
	return true
}

// dequeue removes w from the waiters, and reports false if it was woken before.
func (h *watermark) dequeue(w *waiter) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for i, x := range h.waiting {
		if x == w {
			h.waiting = append(h.waiting[:i], h.waiting[i+1:]...)
			h.parked.Add(-1)
			return true
		}
	}
	return false
}

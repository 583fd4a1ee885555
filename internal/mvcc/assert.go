package mvcc

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// The assertions of this package. Each is called inside `if invariants.Enabled`, at one side of an invariant whose other
// side is elsewhere: visible and the ring, the slot and the low watermark, the latch and the installed version.

// assertInstallable: epoch e is not visible yet, the ring has room for it, and its entry is free.
func (h *watermark) assertInstallable(e uint64) {
	visible := h.visible.Load()
	if e <= visible {
		invariants.Fail("epoch %d is installed while %d is visible already", e, visible)
	}
	if e > visible+uint64(len(h.ring)) {
		invariants.Fail("epoch %d is more than the ring's %d entries after visible %d", e, len(h.ring), visible)
	}
	if old := h.ringEntry(e).Load(); old > visible {
		invariants.Fail("the ring entry of epoch %d still has epoch %d, which is not visible", e, old)
	}
}

// assertSnapshot: a session reads at an epoch that is visible, and whose versions its slot protects.
func (x *Session) assertSnapshot() {
	if visible := x.store.Visible(); x.at > visible {
		invariants.Fail("a snapshot at epoch %d, after visible %d", x.at, visible)
	}
	if least := x.store.MinVisible(); x.hasSnapshot && x.at < least {
		invariants.Fail("a snapshot at epoch %d, before min-visible %d", x.at, least)
	}
}

// assertLatched: the latch of every key is held when its versions are installed, and no later epoch was under it.
func (x *Session) assertLatched(w *Write, epoch keys.Epoch) {
	if !x.store.latches.allHeld(&x.committing.held) {
		invariants.Fail("epoch %d is installed without the latches of its keys", epoch)
	}
	var set latchSet
	for i := range w.Batch.Count() {
		set.reset()
		set.add(x.store.latches, latchKey(w.Batch.Key(i)))
		stripe := &x.store.latches.table[set.only]
		if stripe.state.Load()&latchHeld == 0 {
			invariants.Fail("epoch %d writes a key whose latch is not held", epoch)
		}
		if stripe.newest != epoch {
			invariants.Fail("epoch %d is installed under a latch whose newest epoch is %d", epoch, stripe.newest)
		}
	}
}

// allHeld reports whether every latch of the set is held.
func (l *latches) allHeld(s *latchSet) bool {
	if s.count == 1 {
		return l.table[s.only].state.Load()&latchHeld != 0
	}
	for stripe := s.next(0); s.count > 1 && stripe < stripes; stripe = s.next(stripe + 1) {
		if l.table[stripe].state.Load()&latchHeld == 0 {
			return false
		}
	}
	return true
}

// assertAlone: one goroutine at a time uses a session to write.
func (x *Session) assertAlone(begin bool) {
	if !x.committing.writing.CompareAndSwap(!begin, begin) {
		invariants.Fail("two goroutines write with one session")
	}
}

// Touch is a key of clients that is read or written, or a range of which an answer depends on every key.
type Touch struct {
	Lower, Upper []byte // a nil Upper is no bound
	Single       bool   // the key Lower alone
	Write        bool
}

// touchFunc reports whether a request has named what a session touches for it.
type touchFunc func(*Touch) bool

// AssertTouches sets what knows which keys the request of the session has named, until the end of the session. In builds with
// the tag `invariants`, each key that is read, returned by a cursor, compared by a condition or written must be one of them.
func (x *Session) AssertTouches(named func(*Touch) bool) {
	if invariants.Enabled {
		x.touches = named
	}
}

// assertRead: the request has named the key of a client as one that it reads.
func (x *Session) assertRead(key []byte) { x.assertTouch(&Touch{Lower: key, Single: true}) }

// assertRange: the request has named all of a range as keys that it reads. That a range has no keys is an answer, too.
func (x *Session) assertRange(lower, upper []byte) {
	if upper == nil || bytes.Compare(lower, upper) < 0 {
		x.assertTouch(&Touch{Lower: lower, Upper: upper})
	}
}

func (x *Session) assertTouch(t *Touch) {
	if x.touches != nil && !x.touches(t) {
		invariants.Fail("a request touches keys that it has not named: %q to %q (one key: %v, write: %v)", t.Lower, t.Upper, t.Single, t.Write)
	}
}

// assertReads is assertRead for many keys.
func (x *Session) assertReads(list [][]byte) {
	for _, key := range list {
		x.assertRead(key)
	}
}

// assertWritten: the request has named all keys of clients in its batch as keys that it writes.
func (x *Session) assertWritten(w *Write) {
	for i := range w.Batch.Count() {
		if internal := w.Batch.Key(i); x.touches != nil && keys.SpaceOf(internal) == keys.SpaceUser {
			x.assertTouch(&Touch{Lower: keys.User(internal), Single: true, Write: true})
		}
	}
}

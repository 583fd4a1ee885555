package storage

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// copyBench is a bench with a state, and a clock that a test sets.
type copyBench struct {
	*bench
	clock atomic.Int64 // nanoseconds
}

func newCopyBench(t *testing.T) *copyBench {
	b := &copyBench{bench: newBench(t)}
	t.Cleanup(func() { _ = b.engine.Close() }) // the test has closed it, unless it failed
	b.put(0, 100, 50)
	b.checkpoint()
	return b
}

func (b *copyBench) now() time.Time { return time.Unix(0, b.clock.Load()) }

func (b *copyBench) pin(lifetime time.Duration) *CopyState {
	b.t.Helper()
	s, err := b.engine.pinCopy(b.t.Context(), lifetime, b.now)
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

func (b *copyBench) pinned() int {
	b.engine.checkpoints.pins.mu.Lock()
	defer b.engine.checkpoints.pins.mu.Unlock()
	return len(b.engine.checkpoints.pins.pinned)
}

// A job that has died keeps no pages for longer than a lifetime, and one that renews its pin keeps them for as long as it does.
func TestPinOfADeadCopyEndsAtItsDeadline(t *testing.T) {
	b := newCopyBench(t)
	s := b.pin(time.Hour)
	defer s.Release()
	b.clock.Store(int64(time.Hour - 1))
	s.expire()
	if err := s.Renew(); err != nil || b.pinned() != 1 {
		t.Fatalf("a moment before the deadline: %v, %d states are pinned", err, b.pinned())
	}
	b.clock.Store(int64(2*time.Hour - 2)) // a moment before the deadline that Renew has set
	s.expire()
	if b.pinned() != 1 {
		t.Fatal("the pin has ended although it was renewed")
	}
	b.clock.Store(int64(2*time.Hour - 1))
	s.expire()
	if err := s.Renew(); !errors.Is(err, ErrPinEnded) || b.pinned() != 0 {
		t.Fatalf("after the deadline: %v, %d states are pinned", err, b.pinned())
	}
	s.Release() // for the second time
	other := b.pin(time.Hour)
	s.Release()
	if b.pinned() != 1 {
		t.Fatal("releasing an ended pin has released that of another copy")
	}
	other.Release()
	if b.pinned() != 0 {
		t.Fatal("a released state is pinned")
	}
}

// Nothing but time is needed for the end of a pin.
func TestPinEndsByItself(t *testing.T) {
	b := newCopyBench(t)
	s := b.pin(time.Millisecond)
	b.clock.Store(int64(time.Hour))
	for deadline := time.Now().Add(20 * time.Second); b.pinned() > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a pin whose deadline has passed has not ended")
		}
	}
	if err := s.Renew(); !errors.Is(err, ErrPinEnded) {
		t.Fatal(err)
	}
}

// TestASyncThatFailsBesideARestorationFailsIt: what it has dropped is clean for later syncs, which succeed. Nothing names the file a store.
func TestASyncThatFailsBesideARestorationFailsIt(t *testing.T) {
	b := newCopyBench(t)
	s := b.pin(time.Hour)
	superblock := s.Pages.Superblock()
	s.Release()
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
	for _, writes := range []int{1, 2, 5} {
		disk := vfs.NewFaulty(vfs.NewMem())
		if err := disk.MkdirAll("restored"); err != nil {
			t.Fatal(err)
		}
		r, err := BeginRestore(disk, "restored", superblock)
		if err != nil {
			t.Fatal(err)
		}
		rule := disk.Inject(vfs.Rule{Op: vfs.OpSyncData | vfs.OpSync, Nth: 1, Fault: vfs.DiscardDirty})
		for range writes {
			err = errors.Join(err, r.WritePages(2, make([]byte, restoreSyncBytes)))
		}
		if err = errors.Join(err, r.Finish(nil)); err == nil || rule.Fired() != 1 {
			t.Errorf("%d writes: %v, %d syncs failed", writes, err, rule.Fired())
		}
		if _, err := (Files{disk, "restored"}).OpenState(); err == nil {
			t.Errorf("%d writes: the file is a store", writes)
		}
	}
}

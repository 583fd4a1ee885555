package mvcc

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSessionsKnowWhereTheyWaited: the wait for a latch, and the wait for memory while checkpoints do not proceed, are
// counted where they happen, once, and a request that waits for nothing counts nothing.
func TestSessionsKnowWhereTheyWaited(t *testing.T) {
	const hold = 30 * time.Millisecond
	fs := vfs.NewMem()
	o := tiny(fs)
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	waits := func() (w Waits) {
		x.TakeWaits(&w)
		return w
	}
	mustWrite := func(key, value string) {
		t.Helper()
		if _, err := put(x, key, value, DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	if mustWrite("key", "value"); waits() != (Waits{}) {
		t.Error("a put that waited for nothing")
	}

	other := mustSession(t, s)
	defer other.Close()
	var key latchSet
	key.reset()
	key.add(s.latches, keys.Append(nil, keys.SpaceUser, []byte("key")))
	if err := s.latches.lock(t.Context(), &key, other.parker); err != nil {
		t.Fatal(err)
	}
	go func() {
		for s.latches.table[key.only].state.Load()&latchWanted == 0 {
			time.Sleep(time.Millisecond)
		}
		time.Sleep(hold)
		s.latches.unlock(&key)
	}()
	mustWrite("key", "value")
	if w := waits(); w.Latch < hold/2 || w.Memory != 0 {
		t.Errorf("after a wait for a latch: %+v", w)
	}

	var slow atomic.Bool
	slow.Store(true)
	fs.SetHook(func(op vfs.Op, name string) {
		for op == vfs.OpWrite && strings.HasSuffix(name, ".ekv") && slow.Load() {
			time.Sleep(time.Millisecond)
		}
	})
	stop := make(chan struct{})
	var release sync.WaitGroup
	release.Go(func() { // lets the writer go on when it is stopped because memory is full
		for s.Stats().Storage.Backpressure.Stalls == 0 {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
		time.Sleep(hold)
		slow.Store(false)
	})
	var w Waits
	for i := 0; slow.Load() && w.Memory == 0; i++ {
		mustWrite(strings.Repeat("k", 1+i%100), strings.Repeat("v", 10_000))
		x.TakeWaits(&w)
	}
	close(stop)
	release.Wait()
	slow.Store(false)
	if w.Memory == 0 || w.Latch != 0 {
		t.Errorf("while no checkpoint proceeds: %+v", w)
	}
}

package mvcc

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// readHeld reads what a held bulk load has written.
func readHeld(t *testing.T, c *Changes, at keys.Epoch, from string) map[string]string {
	t.Helper()
	found, last := map[string]string{}, ""
	err := c.ReadLoad(t.Context(), at, []byte(from), func(key, value []byte) error {
		if string(key) <= last {
			return fmt.Errorf("key %q after %q", key, last)
		}
		last = string(key)
		found[last] = string(value)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestBulkLoadIsHeldOverRestarts: what it has written can be read until it is released, whatever is written and collected meanwhile.
func TestBulkLoadIsHeldOverRestarts(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	s.HoldBulkLoads(true)
	rng := rand.New(rand.NewPCG(1, 2))
	x := mustSession(t, s)
	if _, err := put(x, "key-00004", "not loaded", DurabilitySync); err != nil {
		t.Fatal(err)
	}
	before, err := put(x, "key-00003", "before", DurabilitySync)
	if err != nil {
		t.Fatal(err)
	}
	began := s.clock.Now() // the store's; that of the system may be later
	want := entriesFor("a", 300, 3, rng)
	loaded := mustLoad(t, s, want)
	ended := s.clock.Now()
	for round := range 3 {
		for i := range 400 {
			if _, err := put(x, fmt.Sprintf("key-%05d", i), fmt.Sprint("after ", round), DurabilityAsync); err != nil {
				t.Fatal(err)
			}
		}
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		x.Close()
		mustClose(t, s)
		s = mustOpen(t, o)
		x = mustSession(t, s)
	}
	c := s.Changes()
	load, held, pending := c.HeldLoad(before, loaded.Epoch)
	if !held || pending || load.Epoch != loaded.Epoch || load.After != before || load.Time < began || load.Time > ended {
		t.Fatalf("%+v, %v, %v; loaded from %d to %d", load, held, pending, began, ended)
	}
	if _, other, _ := c.HeldLoad(before+1, loaded.Epoch); other {
		t.Fatal("another gap of the log is taken for the bulk load")
	}
	if got := readHeld(t, c, loaded.Epoch, ""); !maps.Equal(got, want) {
		t.Fatalf("%d entries of %d, or other ones", len(got), len(want))
	}
	maps.DeleteFunc(want, func(k, _ string) bool { return k < "key-00450" })
	if got := readHeld(t, c, loaded.Epoch, "key-00450"); !maps.Equal(got, want) {
		t.Fatalf("from a key on: %d entries of %d, or other ones", len(got), len(want))
	}
	if err := c.RenewLoads(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.ReleaseLoads(t.Context(), loaded.Epoch-1); err != nil || len(s.Holds()) != 1 {
		t.Fatalf("%v, %+v", err, s.Holds())
	}
	if err := c.ReleaseLoads(t.Context(), loaded.Epoch); err != nil || len(s.Holds()) != 0 {
		t.Fatalf("%v, %+v", err, s.Holds())
	}
	if _, held, _ = c.HeldLoad(before, loaded.Epoch); held {
		t.Fatal("what was released is still held")
	}
}

// TestBulkLoadThatIsPublishedIsPendingUntilItIsHeld: it is never taken for one that is not held.
func TestBulkLoadThatIsPublishedIsPendingUntilItIsHeld(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	s.HoldBulkLoads(true)
	if err := s.timeline.takeTurn(t.Context()); err != nil { // no hold can be taken
		t.Fatal(err)
	}
	done := make(chan BulkLoaded, 1)
	before := s.Visible()
	go func() {
		out, err := load(s, map[string]string{"a": "loaded", "b": "loaded"})
		if err != nil {
			t.Error(err)
		}
		done <- out
	}()
	for deadline := time.Now().Add(20 * time.Second); s.Visible() == before; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the bulk load does not become visible")
		}
	}
	x, e := mustSession(t, s), s.Visible()
	defer x.Close()
	for range 300 { // the collector runs every millisecond, and must keep what is not held yet
		if _, err := put(x, "a", "after", DurabilityAsync); err != nil {
			t.Fatal(err)
		}
		if _, held, pending := s.Changes().HeldLoad(before, e); held || !pending {
			t.Fatalf("held %v, pending %v", held, pending)
		}
	}
	s.collector.collect(nil, true)
	s.timeline.endTurn()
	if out := <-done; out.Epoch != e {
		t.Fatalf("epoch %d, want %d", out.Epoch, e)
	}
	if _, held, pending := s.Changes().HeldLoad(before, e); !held || pending {
		t.Fatalf("held %v, pending %v", held, pending)
	}
	if got := readHeld(t, s.Changes(), e, ""); got["a"] != "loaded" || len(got) != 2 {
		t.Fatalf("%v", got)
	}
}

// TestArchiveThatBeginsInACommitPauseDoesNotWaitForItsLoad: whose versions nothing has kept.
func TestArchiveThatBeginsInACommitPauseDoesNotWaitForItsLoad(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	before := s.Visible()
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if err := l.Add([]byte("a"), []byte("loaded")); err != nil {
		t.Fatal(err)
	}
	l.Permit(func() error {
		s.HoldBulkLoads(true)
		return nil
	})
	out, err := l.Commit(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, held, pending := s.Changes().HeldLoad(before, out.Epoch); held || pending {
		t.Fatalf("held %v, pending %v", held, pending)
	}
}

// TestBulkLoadsAreNotHeldWithoutAnArchive: and a hold of a client that looks like one is none.
func TestBulkLoadsAreNotHeldWithoutAnArchive(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	mustLoad(t, s, map[string]string{"a": "loaded"})
	if held := s.Holds(); len(held) > 0 {
		t.Fatalf("%+v", held)
	}
	x := mustSession(t, s)
	defer x.Close()
	for _, owner := range []string{"log archive: bulk load", "log archive: bulk load after epoch 0, yesterday", "log archive: bulk load after epoch 0, 2026-11-22T10:00:00.000000Z and more"} {
		h, err := x.TakeHold(context.Background(), owner, 0, time.Hour)
		if err != nil {
			t.Fatal(err)
		}
		if l, is := h.heldLoad(); is {
			t.Errorf("%q is %+v", owner, l)
		}
	}
	if err := s.Changes().ReleaseLoads(t.Context(), keys.MaxEpoch); err != nil || len(s.Holds()) != 3 {
		t.Fatalf("%v, %+v", err, s.Holds())
	}
}

// TestTheHoldOfABulkLoadNeedsNoPermission: it is the store's, and the load is published. Its user may have lost the right since.
func TestTheHoldOfABulkLoadNeedsNoPermission(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	s.HoldBulkLoads(true)
	x := mustSession(t, s)
	defer x.Close()
	before, err := put(x, "k", "v", DurabilitySync)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	calls := 0
	l.Permit(func() error {
		if calls++; calls > 1 {
			return fmt.Errorf("the user was deleted; call %d", calls)
		}
		return nil
	})
	if err := l.Add([]byte("key"), []byte("v")); err != nil {
		t.Fatal(err)
	}
	loaded, err := l.Commit(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, held, _ := s.Changes().HeldLoad(before, loaded.Epoch); !held || calls != 1 {
		t.Errorf("held %v, %d calls", held, calls)
	}
}

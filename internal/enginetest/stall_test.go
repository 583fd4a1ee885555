package enginetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestOversizedRecordIsNotStarved writes records that are larger than a segment beside writers that
// fill any segment at once. The segment made for such a record must be its own first.
func TestOversizedRecordIsNotStarved(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	var stop atomic.Bool
	var background sync.WaitGroup
	for i := range 8 {
		x := mustSession(t, s)
		background.Go(func() {
			defer x.Close()
			value := bytes.Repeat([]byte{'v'}, 3000)
			for n := 0; !stop.Load(); n++ {
				var w mvcc.Write
				w.Durability = mvcc.DurabilityAsync
				w.Set(fmt.Appendf(nil, "small-%d-%d", i, n%64), value)
				if _, err := commitAndWait(x, &w); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	defer background.Wait()
	defer stop.Store(true)
	x := mustSession(t, s)
	defer x.Close()
	for n := range 20 / thinned {
		body := patterned(1<<20, "big")
		if _, err := put(x, fmt.Sprintf("big-%d", n), body, mvcc.DurabilityAsync); err != nil {
			t.Fatal(err)
		}
		tx, err := x.Begin(mvcc.TxnOptions{Durability: mvcc.DurabilityAsync})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Get(nil, []byte("big-0")); err != nil {
			t.Fatal(err)
		}
		if err := tx.Set([]byte("big-txn"), []byte(body)); err != nil {
			t.Fatal(err)
		}
		e, err := tx.Commit(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Wait(context.Background(), e, mvcc.DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOversizedTransactionsAreValidatedAfterTheirReservation: a record that is oversized gets its
// epoch first and is validated then. Two transactions that each read both keys and write one of
// them must not both commit.
func TestOversizedTransactionsAreValidatedAfterTheirReservation(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	names := []string{"a", "b"}
	for round := range 300 {
		start := make(chan struct{})
		var commits atomic.Int32
		var both sync.WaitGroup
		for i := range 2 {
			x := mustSession(t, s)
			tx, err := x.Begin(mvcc.TxnOptions{Durability: mvcc.DurabilityAsync})
			if err != nil {
				t.Fatal(err)
			}
			both.Go(func() {
				defer x.Close()
				if i == 0 {
					_, _ = tx.Get(nil, []byte("b"))
				} else if _, err := tx.DeleteRange(context.Background(), []byte("a"), []byte("a0")); err != nil { // a range, for the other one
					t.Error(err)
				}
				if err := tx.Set([]byte(names[i]), []byte(patterned(40<<10, names[i]))); err != nil {
					t.Error(err)
				}
				<-start
				var conflict *mvcc.ConflictError
				switch _, err := tx.Commit(context.Background()); {
				case err == nil:
					commits.Add(1)
				case !errors.As(err, &conflict):
					t.Error(err)
				}
			})
		}
		close(start)
		both.Wait()
		if n := commits.Load(); n != 1 {
			t.Fatalf("round %d: %d transactions committed", round, n)
		}
		var w mvcc.Write
		w.Delete([]byte("a"))
		w.Delete([]byte("b"))
		x := mustSession(t, s)
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
		x.Close()
	}
}

// TestOneCommitLargerThanTheBudgetDoesNotWedgeTheStore: a generation that is larger than the memory
// of all immutable generations must become immutable nevertheless, since nothing else can make
// room.
func TestOneCommitLargerThanTheBudgetDoesNotWedgeTheStore(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemoryBytes, o.Storage.StallMax = 4<<20, 20*time.Second // a wedge would last
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	if _, err := put(x, "big", patterned(6<<20, "big"), mvcc.DurabilityAsync); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		if _, err := put(x, fmt.Sprintf("small-%d", i), "v", mvcc.DurabilityAsync); err != nil {
			t.Fatalf("put %d after the large one: %v", i, err)
		}
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// TestFailingCheckpointIsNotTriedInALoop: a checkpoint that fails for a reason that may pass is
// tried again in time, and not by each writer that waits for memory at once.
func TestFailingCheckpointIsNotTriedInALoop(t *testing.T) {
	faults := vfs.NewFaulty(vfs.NewMem())
	o := tiny(faults)
	o.Storage.MemoryBytes, o.Storage.StallMax = 4<<20, 500*time.Millisecond
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	value := string(make([]byte, 500))
	for i := range 3000 {
		mustPut(t, s, fmt.Sprintf("%06d", i), value)
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	rule := faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Err: syscall.ENOMEM})
	defer rule.Remove()
	for i := 0; ; i++ {
		before := rule.Fired()
		_, err := put(x, fmt.Sprintf("%06d", i%3000), value, mvcc.DurabilityAsync)
		if err == nil && i < 100_000 {
			continue
		}
		if tries := rule.Fired() - before; !errors.Is(err, mvcc.ErrMemoryFull) || tries > 100 {
			t.Fatalf("write %d: %v, and %d reads failed meanwhile", i, err, tries)
		}
		return
	}
}

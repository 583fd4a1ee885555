package mvcc

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// endingContext ends when it was looked at so many times.
type endingContext struct {
	context.Context
	left int
}

func (c *endingContext) Err() error {
	if c.left--; c.left < 0 {
		return context.Canceled
	}
	return nil
}

// putMany commits n keys in batches.
func putMany(t testing.TB, x *Session, n int, set func(w *Write, key []byte)) {
	t.Helper()
	w := Write{Durability: DurabilityAsync}
	for i := range n {
		set(&w, fmt.Appendf(nil, "key-%07d", i))
		if w.Batch.Count() == 500 || i == n-1 {
			if _, err := commitAndWait(x, &w); err != nil {
				t.Fatal(err)
			}
			w.Reset()
			w.Durability = DurabilityAsync
		}
	}
}

// deletedStore has n keys, all of them deleted but for a reader's snapshot, so that every tombstone
// is kept: in the tree, or in memtables.
func deletedStore(t testing.TB, n int, inTree bool) *Store {
	t.Helper()
	o := tiny(vfs.NewMem())
	o.Storage.PageSize = 512
	if !inTree {
		o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.Storage.CheckpointBytes = 64<<20, 64<<20, 1<<30
		o.Storage.MemoryBytes = 1 << 30
	}
	s := mustOpen(t, o)
	x, reader := mustSession(t, s), mustSession(t, s)
	t.Cleanup(func() { x.Close(); reader.Close() })
	putMany(t, x, n, func(w *Write, key []byte) { w.Set(key, []byte("value")) })
	if _, err := reader.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	putMany(t, x, n, func(w *Write, key []byte) { w.Delete(key) })
	if inTree {
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// TestScanOverDeletionsLeavesItsGuardEveryFewLeaves: the one Next of an empty result does not hold
// up what waits for readers to leave.
func TestScanOverDeletionsLeavesItsGuardEveryFewLeaves(t *testing.T) {
	testseed.SkipUnderRace(t)
	const n = 30_000
	for _, inTree := range []bool{true, false} {
		s := deletedStore(t, n, inTree)
		x := mustSession(t, s)
		for _, reverse := range []bool{false, true} {
			o := ScanOptions{Reverse: reverse}
			if _, err := x.OpenSnapshot(0); err != nil {
				t.Fatal(err)
			}
			c, err := x.Scan(o)
			if err != nil {
				t.Fatal(err)
			}
			if c.Next() || c.Err() != nil {
				t.Fatalf("found %q, %v", c.Key(), c.Err())
			}
			least := n / stepsPerGuard
			if inTree {
				least = n / 20 / storage.LeavesMax // a leaf of 512 bytes has some ten tombstones, and the versions below them
			}
			if c.guardEntries < least {
				t.Errorf("in the tree %v, reverse %v: %d deletions passed in %d guards, want at least %d", inTree, reverse, n, c.guardEntries, least)
			}
			// A context that ends in the middle of the one Next ends it at the next look.
			ctx := &endingContext{Context: t.Context(), left: least / 2}
			o.Context = ctx
			if c, err = x.Scan(o); err != nil {
				t.Fatal(err)
			}
			if c.Next() || !errors.Is(c.Err(), context.Canceled) || c.guardEntries != least/2 {
				t.Errorf("in the tree %v, reverse %v: %v after %d guards, want %d", inTree, reverse, c.Err(), c.guardEntries, least/2)
			}
			x.CloseSnapshot()
		}
		x.Close()
	}
}

// TestContextEndsEveryWalkOverDeletions: range deletes and scans of transactions look at it in the
// middle of the one step over many deleted keys.
func TestContextEndsEveryWalkOverDeletions(t *testing.T) {
	testseed.SkipUnderRace(t)
	s := deletedStore(t, 30_000, true)
	x := mustSession(t, s)
	defer x.Close()
	transaction := func(do func(tx *Txn) error) error {
		tx, err := x.Begin(TxnOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		return do(tx)
	}
	for name, walk := range map[string]func(ctx context.Context) error{
		"range delete": func(ctx context.Context) error {
			_, err := x.DeleteRange(ctx, RangeDelete{})
			return err
		},
		"range delete of a transaction": func(ctx context.Context) error {
			return transaction(func(tx *Txn) error {
				_, err := tx.DeleteRange(ctx, nil, nil)
				return err
			})
		},
		"scan of a transaction": func(ctx context.Context) error {
			return transaction(func(tx *Txn) error {
				c, err := tx.Scan(ScanOptions{Context: ctx})
				if err != nil {
					t.Fatal(err)
				}
				if c.Next() {
					t.Errorf("found %q", c.Key())
				}
				return c.Err()
			})
		},
	} {
		if err := walk(t.Context()); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if err := walk(&endingContext{Context: t.Context(), left: 10}); !errors.Is(err, context.Canceled) || x.buffers.cursor.guardEntries != 10 {
			t.Errorf("%s: %v after %d guards, want 10", name, err, x.buffers.cursor.guardEntries)
		}
	}
}

// TestScanSkipsKeysNewerThanItsSnapshotInShortGuards, which only the storage cursor sees.
func TestScanSkipsKeysNewerThanItsSnapshotInShortGuards(t *testing.T) {
	testseed.SkipUnderRace(t)
	const n = 30_000
	o := tiny(vfs.NewMem())
	o.Storage.MemtableBytes, o.Storage.SegmentBytes, o.Storage.CheckpointBytes = 64<<20, 64<<20, 1<<30
	o.Storage.MemoryBytes = 1 << 30
	s := mustOpen(t, o)
	mustPut(t, s, "aaa", "first")
	mustPut(t, s, "zzz", "last")
	x, reader := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer reader.Close()
	if _, err := reader.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	putMany(t, x, n, func(w *Write, key []byte) { w.Set(key, []byte("value")) })
	for _, reverse := range []bool{false, true} {
		c, err := reader.Scan(ScanOptions{Reverse: reverse})
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for c.Next() {
			got = append(got, string(c.Value()))
		}
		if c.Err() != nil || len(got) != 2 || c.guardEntries < n/4096 {
			t.Errorf("reverse %v: %v, %v in %d guards", reverse, got, c.Err(), c.guardEntries)
		}
		if want := map[bool]string{false: "first last", true: "last first"}[reverse]; strings.Join(got, " ") != want {
			t.Errorf("reverse %v: %v", reverse, got)
		}
	}
}

// TestLongBatchGetDelaysNoWriter reads many keys from a slow device, beside a writer whose memory
// is soon full if what checkpoints have merged cannot be freed before the batch is through.
func TestLongBatchGetDelaysNoWriter(t *testing.T) {
	const n = 20_000
	faulty := vfs.NewFaulty(vfs.NewMem())
	o := tiny(faulty)
	o.Storage.PageSize, o.Storage.MemoryBytes, o.Storage.CacheBytes = 512, 2<<20, 1<<19
	o.Storage.StallMax = time.Second // a checkpoint takes long on a busy machine, and the batch three times as long at least
	s := mustOpen(t, o)
	x := mustSession(t, s)
	defer x.Close()
	putMany(t, x, n, func(w *Write, key []byte) { w.Set(key, []byte("value")) })
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	list := make([][]byte, n)
	for i := range list {
		list[i] = fmt.Appendf(nil, "key-%07d", (i*7919)%n) // in no order
	}
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	var reading atomic.Bool
	reading.Store(true)
	var done sync.WaitGroup
	defer done.Wait()
	defer reading.Store(false)
	wrote := 0
	done.Go(func() {
		y := mustSession(t, s)
		defer y.Close()
		value := strings.Repeat("x", 1000)
		for reading.Load() {
			if _, err := put(y, fmt.Sprintf("other-%d", wrote%5000), value, DurabilityAsync); err != nil {
				t.Errorf("put %d: %v", wrote, err)
				return
			}
			wrote++
		}
	})
	// Submissions are slow, and a merge reads few pages compared with the batch.
	slow := faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: "*.ekv", Fault: vfs.Slow, Delay: time.Millisecond})
	start, found := time.Now(), 0
	err := x.ReadAll(t.Context(), list, func(i int, v Value) error {
		if !v.Found || string(v.Data) != "value" {
			return fmt.Errorf("key %d: %q, found %v", i, v.Data, v.Found)
		}
		found++
		return nil
	})
	slow.Remove()
	t.Logf("%d keys in %v and %d guards", found, time.Since(start), x.buffers.batch.guardEntries)
	if err != nil || found != n {
		t.Fatalf("%d of %d keys: %v", found, n, err)
	}
	if x.buffers.batch.guardEntries < n/64 {
		t.Errorf("%d keys in %d guards", n, x.buffers.batch.guardEntries)
	}
	reading.Store(false)
	done.Wait()
	if wrote < 100 {
		t.Errorf("%d puts during the batch", wrote)
	}
	ctx := &endingContext{Context: t.Context(), left: 10}
	if err := x.ReadAll(ctx, list, func(int, Value) error { return nil }); !errors.Is(err, context.Canceled) || x.buffers.batch.guardEntries > 11 {
		t.Errorf("%v after %d guards", err, x.buffers.batch.guardEntries)
	}
	x.CloseSnapshot()
}

// lookedAtContext calls a function each time it is looked at.
type lookedAtContext struct {
	context.Context
	look func()
}

func (c *lookedAtContext) Err() error {
	c.look()
	return c.Context.Err()
}

// commitAfterReading commits a serializable transaction that has read the keys of putMany.
func commitAfterReading(ctx context.Context, x *Session, n int) error {
	tx, err := x.Begin(TxnOptions{Durability: DurabilityAsync})
	for i := 0; i < n && err == nil; i++ {
		_, err = tx.Get(nil, fmt.Appendf(nil, "key-%07d", i))
	}
	if err == nil {
		err = tx.Set([]byte("own"), nil)
	}
	if err == nil {
		_, err = tx.Commit(ctx)
	}
	return err
}

// TestValidationOfManyKeysHoldsUpNoWriter: the validation of a transaction that has read many keys
// leaves its guard every few keys, and ends with the context.
func TestValidationOfManyKeysHoldsUpNoWriter(t *testing.T) {
	const n = 1000
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	putMany(t, x, n, func(w *Write, key []byte) { w.Set(key, []byte("value")) })
	most := 0
	for attempt := 0; attempt < 50 && most < n/checkContextEvery-1; attempt++ { // another goroutine may be preempted inside its guard
		retired, left := uint64(0), 0
		ctx := &lookedAtContext{Context: t.Context(), look: func() {
			if retired != 0 && s.registry.OldestTick() > retired {
				left++
			}
			retired = s.registry.Retire()
		}}
		if err := commitAfterReading(ctx, x, n); err != nil {
			t.Fatal(err)
		}
		most = max(most, left)
	}
	if most < n/checkContextEvery-1 {
		t.Errorf("a validation of %d keys left its guard at most %d times", n, most)
	}
	if err := commitAfterReading(&endingContext{t.Context(), 3}, x, n); !errors.Is(err, context.Canceled) {
		t.Errorf("a validation under a context that ends: %v", err)
	}
}

// TestValidationOfPointsReadsNoLeafWithoutNewVersions: what a transaction has read is validated
// with inner pages, as far as they tell that nothing is newer.
func TestValidationOfPointsReadsNoLeafWithoutNewVersions(t *testing.T) {
	const n = 1000
	s := mustOpen(t, tiny(vfs.NewMem()))
	x := mustSession(t, s)
	defer x.Close()
	putMany(t, x, n, func(w *Write, key []byte) { w.Set(key, []byte("value")) })
	mustCheckpoint(t, s)
	var r readSet
	at, err := x.OpenSnapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	r.reset(at)
	for i := range n {
		r.addPoint(internalKey(fmt.Sprintf("key-%07d", i)))
	}
	before := s.engine.Stats().Cache
	x.slot.Enter()
	err = x.walk(t.Context(), &r, nil)
	x.slot.Leave()
	x.reader.Flush()
	after := s.engine.Stats().Cache
	if visits := after.Hits + after.Misses - before.Hits - before.Misses; err != nil || visits > n*3/2 {
		t.Errorf("%v; %d pages were visited for %d keys in a tree of two levels", err, visits, n)
	}
}

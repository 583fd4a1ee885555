package enginetest

import (
	"context"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// coldStore is a store whose keys are all in a tree of many leaves, and none of them in memory.
func coldStore(t *testing.T, count int, cacheBytes int64) *session {
	t.Helper()
	return coldStoreOf(t, count, storage.Options{CacheBytes: cacheBytes})
}

func coldStoreOf(t *testing.T, count int, so storage.Options) *session {
	t.Helper()
	so.Dir, so.FS, so.MemoryBytes, so.PageSize = "db", vfs.NewMem(), 64<<20, 4096
	o := mvcc.Options{Storage: so}
	s := mustOpen(t, o)
	var w mvcc.Write
	for i := range count {
		w.Set(coldKey(i), fmt.Appendf(nil, "%090d", i))
	}
	if _, err := commitAndWait(mustSession(t, s), &w); err != nil {
		t.Fatal(err)
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	mustClose(t, s)
	return mustSession(t, mustOpen(t, o))
}

func coldKey(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }

// scanCold scans from a key, looks at so many entries, and says which pages were read for that: one
// by one, and in so many batches.
func scanCold(t *testing.T, x *session, o mvcc.ScanOptions, entries int) (single, batches, batched uint64) {
	t.Helper()
	before := x.store.Stats().Storage
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	defer x.CloseSnapshot()
	c, err := x.Scan(o)
	if err != nil {
		t.Fatal(err)
	}
	first, step := int(binary.BigEndian.Uint32(append(o.Lower, 0, 0, 0, 0))), 1
	if o.Reverse {
		first, step = int(binary.BigEndian.Uint32(o.Upper))-1, -1
	}
	for i := range entries {
		if !c.Next() || string(c.Key()) != string(coldKey(first+step*i)) || string(c.Value()) != fmt.Sprintf("%090d", first+step*i) {
			t.Fatalf("entry %d from %d: %x %q %v", i, first, c.Key(), c.Value(), c.Err())
		}
	}
	after := x.store.Stats().Storage
	return after.Cache.Misses - before.Cache.Misses, after.Cache.BatchReads - before.Cache.BatchReads, after.Cache.BatchPages - before.Cache.BatchPages
}

// TestScanReadsTheLeavesOfItsLimitTogether: what a limit needs is one submission, on the seek, in
// both directions.
func TestScanReadsTheLeavesOfItsLimitTogether(t *testing.T) {
	testseed.SkipUnderRace(t)
	x := coldStore(t, 30_000, 4<<20)
	scanCold(t, x, mvcc.ScanOptions{Lower: coldKey(29_000)}, 1) // the inner nodes
	for i, o := range []mvcc.ScanOptions{
		{Lower: coldKey(1000), Limit: 100}, {Upper: coldKey(5000), Limit: 100, Reverse: true}, {Lower: coldKey(9000), Upper: coldKey(9500), Limit: 100},
	} {
		single, batches, pages := scanCold(t, x, o, o.Limit)
		if single > 1 || batches != 1 || pages < 3 || pages > 6 { // 28 entries to a leaf; another inner node, perhaps
			t.Errorf("scan %d: %d pages one by one, %d in %d batches", i, single, pages, batches)
		}
	}
}

// TestSeekReadsOneLeafWithoutALimit: a scan that reads the first entry of a range reads no more
// leaves.
func TestSeekReadsOneLeafWithoutALimit(t *testing.T) {
	x := coldStore(t, 30_000, 4<<20)
	for i, o := range []mvcc.ScanOptions{{Lower: coldKey(1000)}, {Lower: coldKey(6000), Upper: coldKey(9000)}, {Lower: coldKey(12000), Limit: 1}} {
		if _, batches, pages := scanCold(t, x, o, 1); batches != 0 {
			t.Errorf("scan %d: %d pages in %d batches for its first entry", i, pages, batches)
		}
	}
}

// TestScanWithoutAnEndReadsTwiceAsFarEachTime: 2, 4, 8, 16, 32 leaves and then 32 again, so that it
// never reads more ahead than it has read.
func TestScanWithoutAnEndReadsTwiceAsFarEachTime(t *testing.T) {
	testseed.SkipUnderRace(t)
	const entries, perLeaf = 10_000, 28
	x := coldStore(t, 30_000, 4<<20)
	single, batches, pages := scanCold(t, x, mvcc.ScanOptions{}, entries)
	if leaves := uint64(entries / perLeaf); batches > 8+leaves/16 || pages < leaves/2 || pages > 2*leaves || single > 8+leaves/16 {
		t.Errorf("%d entries: %d pages one by one, %d in %d batches", entries, single, pages, batches)
	}
}

// TestLongScanGivesFramesBack reads ten times the cache in one go, and hardly a page past it.
func TestLongScanGivesFramesBack(t *testing.T) {
	testseed.SkipUnderRace(t)
	const count = 100_000
	x := coldStore(t, count, 1<<20)
	scanCold(t, x, mvcc.ScanOptions{}, count)
	scanCold(t, x, mvcc.ScanOptions{Upper: coldKey(count), Reverse: true}, count)
	if s := x.store.Stats().Storage.Cache; s.Uncached > s.Prefetched/40 || s.PrefetchedWasted > s.Prefetched/20 {
		t.Errorf("%d pages were not cached, %d of %d prefetched pages were not used", s.Uncached, s.PrefetchedWasted, s.Prefetched)
	}
}

// TestScanThatHasEndedStaysAtItsEnd: also if the last step went over so many leaves that the next
// one would give up the protection first.
func TestScanThatHasEndedStaysAtItsEnd(t *testing.T) {
	const old, count = 1000, 3000
	x := coldStore(t, old, 4<<20)
	s := x.store
	at, err := x.OpenSnapshot(0)
	if err != nil {
		t.Fatal(err)
	}
	var w mvcc.Write
	for i := old; i < count; i++ {
		w.Set(coldKey(i), make([]byte, 90))
	}
	if _, err := commitAndWait(mustSession(t, s), &w); err != nil {
		t.Fatal(err)
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	c, err := x.Scan(mvcc.ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for c.Next() {
		n++
	}
	if n != old || c.Next() || c.Next() || c.Err() != nil {
		t.Errorf("at epoch %d: %d entries of %d, and after the end %x, %v", at, n, old, c.Key(), c.Err())
	}
	c.Pause()
	if c.Next() {
		t.Errorf("after the end and a pause: %x", c.Key())
	}
	x.CloseSnapshot()
}

// TestScansReadAheadWhilePagesMove: checkpoints move the leaves of a shrinking file down, page by
// page, and overwrite some, while scans read them ahead through a cache that holds a few of them.
// Everybody sees what is there.
func TestScansReadAheadWhilePagesMove(t *testing.T) {
	const count, kept = 60_000, 20_000 // the last ones stay
	x := coldStore(t, count, 512<<10)
	s := x.store
	var w mvcc.Write
	for i := range count - kept {
		w.Delete(coldKey(i))
	}
	if _, err := commitAndWait(x, &w); err != nil {
		t.Fatal(err)
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := s.Stats().Storage

	var stop atomic.Bool
	var scanners sync.WaitGroup
	for n := range 3 {
		own := mustSession(t, s)
		scanners.Go(func() {
			defer own.Close()
			random := rand.New(rand.NewPCG(uint64(n), 1))
			for scans := 0; !stop.Load() || scans == 0; scans++ {
				const limit = 500
				from := count - kept + random.IntN(kept-limit)
				o := mvcc.ScanOptions{Lower: coldKey(from), Upper: coldKey(from + limit), Limit: limit, Reverse: scans%3 == 0}
				if _, err := own.OpenSnapshot(0); err != nil {
					t.Error(err)
					return
				}
				c, err := own.Scan(o)
				for i := 0; err == nil && i < limit; i++ {
					at := from + i
					if o.Reverse {
						at = from + limit - 1 - i
					}
					if !c.Next() || string(c.Key()) != string(coldKey(at)) || string(c.Value()) != fmt.Sprintf("%090d", at) {
						err = fmt.Errorf("entry %d of the scan from %d: %x %q %w", i, from, c.Key(), c.Value(), c.Err())
					}
				}
				own.CloseSnapshot()
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	random := rand.New(rand.NewPCG(9, 9))
	// A scan that is held up protects the pages at the end of the file, so how many checkpoints it
	// takes is not known.
	for n, deadline := 0, time.Now().Add(time.Minute); n < 40 || s.Stats().Storage.Pages.FileBytes > before.Pages.FileBytes/2; n++ {
		if time.Now().After(deadline) {
			t.Errorf("%d checkpoints changed the file from %d to %d bytes: too few pages were moved, the test tests nothing", n, before.Pages.FileBytes, s.Stats().Storage.Pages.FileBytes)
			break
		}
		w.Reset()
		i := count - kept + random.IntN(kept)
		w.Set(coldKey(i), fmt.Appendf(nil, "%090d", i))
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	stop.Store(true)
	scanners.Wait()
	after := s.Stats().Storage
	if after.Cache.Prefetched == before.Cache.Prefetched {
		t.Error("nothing was read ahead")
	}
}

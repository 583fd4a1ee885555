package cache

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/epochkv/epochkv/internal/testseed"
)

func TestRecordsLargerThanTheCacheAreAllReadBack(t *testing.T) {
	testseed.SkipUnderRace(t)
	const pages, frames = 10_000, 1 << 20 / testPageSize
	r := newRig(t, frames)
	for id := range ID(pages) {
		r.get(t, id+1, Default)
	}
	random := seeded(t)
	for range 200_000 {
		r.get(t, ID(random.Uint32N(pages)+1), Hint(random.IntN(int(hints))))
	}
	if s := r.Stats(); s.Resident+s.Retired > frames || s.Resident < frames*9/10 || s.Uncached != 0 {
		t.Errorf("%+v", s)
	}
}

// TestEveryHintsFramesCanBeEvicted fills the cache with pages whose usage counts are at the cap of
// a hint, and then reads other pages: in the end none of the first pages may be left. A cap above
// what the hand can decrement would block the cache here.
func TestEveryHintsFramesCanBeEvicted(t *testing.T) {
	for h := range hints {
		t.Run(fmt.Sprintf("hint=%d", h), func(t *testing.T) {
			const frames = 64
			r := newRig(t, frames)
			for range usageMax + 2 {
				for id := range ID(frames) {
					r.get(t, id+1, h)
				}
			}
			left := func() (n int) {
				for id := range ID(frames) {
					if r.has(id + 1) {
						n++
					}
				}
				return n
			}
			before := r.Stats().Misses
			for range 1000 {
				for id := range ID(frames) {
					r.get(t, 1000+id, VeryHigh)
				}
				if left() == 0 {
					break
				}
			}
			// Every refault adds the credit for about half a decrement of a hot frame, or for a
			// whole one. The other misses are needed because later visits increment the counts
			// again.
			if misses := r.Stats().Misses - before; left() > 0 || misses > 20*usageMax*frames {
				t.Errorf("%d pages are left after %d misses: %+v", left(), misses, r.Stats())
			}
		})
	}
}

// TestHotFramesAreDecrementedWhenNoOtherFrameIsLeft makes every frame hot by changing the limit: the hand must
// find victims nevertheless, within the passes that it has.
func TestHotFramesAreDecrementedWhenNoOtherFrameIsLeft(t *testing.T) {
	const frames = 64
	r := newRig(t, frames)
	k := r.clock
	k.hotLimit.Store(frames)
	for range usageMax + 1 {
		for id := range ID(frames - 2) {
			r.get(t, id+1, VeryHigh)
		}
	}
	before := r.Stats()
	if before.Hot != before.Resident {
		t.Fatalf("only %d of %d frames are hot", before.Hot, before.Resident)
	}
	for id := range ID(frames) {
		r.get(t, 1000+id, VeryLow)
	}
	after := r.Stats()
	if after.Uncached > 0 || after.Decremented == 0 || after.Evicted-before.Evicted < frames {
		t.Errorf("no victims: %+v", after)
	}
	evicted := after.Evicted - before.Evicted
	if examined := after.Examined - before.Examined; examined > evicted*frames*(usageMax+1) {
		t.Errorf("the hand examined %d frames for %d victims", examined, evicted)
	}
}

// TestScanLeavesTheHotSet tests the scan resistance that the hot set is for, at the size for which
// the figure is required. LRU would read all of the hot set again: everything in it was used longer
// ago than the scan, which is twice as large as the cache.
func TestScanLeavesTheHotSet(t *testing.T) {
	const frames, hot = 2048, 1024
	r := newRig(t, frames)
	for range 4 {
		for id := range ID(hot) {
			r.get(t, id+1, Default)
		}
	}
	for id := range ID(2 * frames) {
		r.get(t, 1_000_000+id, Low)
	}
	before := r.disk.loads.Load()
	for id := range ID(hot) {
		r.get(t, id+1, Default)
	}
	if again := r.disk.loads.Load() - before; again*20 > hot {
		t.Errorf("%d of %d hot pages are read again after a scan", again, hot)
	}
}

func TestChangedWorkingSetTakesOverWithinBoundedMisses(t *testing.T) {
	const frames = 1024
	r := newRig(t, frames)
	random := seeded(t)
	visitSet := func(base ID, visits int) (misses int64) {
		before := r.disk.loads.Load()
		for range visits {
			r.get(t, base+ID(random.Uint32N(frames*8/10)), Default)
		}
		return r.disk.loads.Load() - before
	}
	visitSet(1, 20*frames)
	for phase := range ID(4) {
		base := (phase + 1) * 100_000
		if misses := visitSet(base, 20*frames); misses > 6*frames {
			t.Errorf("phase %d: %d misses until a set of %d pages was cached", phase, misses, frames*8/10)
		}
		if misses := visitSet(base, frames); misses > frames/20 {
			t.Errorf("phase %d: still %d misses in %d visits", phase, misses, frames)
		}
	}
}

// TestHotReadsWriteNothing hashes all shared memory of the cache before and after reads of pages
// whose usage counts are at their caps.
func TestHotReadsWriteNothing(t *testing.T) {
	const frames, pages = 256, 100
	r := newRig(t, frames)
	for range usageMax + 1 {
		for id := range ID(pages) {
			r.get(t, id+1, Hint(id%ID(hints)))
		}
	}
	before := r.fingerprint()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			s := r.registry.Slot()
			defer s.Free()
			for i := range 20_000 {
				id := ID(i % pages)
				if err := visit(r.Cache, s, id+1, Hint(id%ID(hints))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if r.fingerprint() != before {
		t.Error("hot reads have changed shared memory")
	}
	r.get(t, 1_000, Default)
	if r.fingerprint() == before {
		t.Error("the fingerprint does not see a miss")
	}
}

// fingerprint hashes the cache itself, its usage counts and its table.
func (c *Cache) fingerprint() uint64 {
	var h maphash.Hash
	h.SetSeed(fingerprintSeed)
	raw := func(p unsafe.Pointer, n uintptr) { _, _ = h.Write(unsafe.Slice((*byte)(p), n)) }
	t := c.table.Load()
	raw(unsafe.Pointer(c), unsafe.Sizeof(*c))
	raw(unsafe.Pointer(c.clock), unsafe.Sizeof(clock{}))
	raw(c.words, uintptr(len(c.states))*usageBytes)
	raw(t.slots, uintptr(t.mask+1)*slotBytes)
	return h.Sum64()
}

var fingerprintSeed = maphash.MakeSeed()

func TestHotWordsHaveTheirOwnCacheLines(t *testing.T) {
	r := newRig(t, 64)
	k := r.clock
	if at := uintptr(unsafe.Pointer(&r.Cache.clock)) + unsafe.Sizeof(r.Cache.clock); uintptr(unsafe.Pointer(&r.mu))-at < 2*lineBytes {
		t.Error("the mutex shares a cache line with fields that hits read")
	}
	limit, hot := uintptr(unsafe.Pointer(&k.hotLimit)), uintptr(unsafe.Pointer(&k.hot))
	if hot-limit < 2*lineBytes || uintptr(unsafe.Pointer(&k.frames))-hot < 2*lineBytes {
		t.Error("the count of hot frames shares a cache line")
	}
	if uintptr(r.words)%lineBytes != 0 || uintptr(r.table.Load().slots)%lineBytes != 0 {
		t.Error("usage counts or table do not begin on a cache line")
	}
	if hot%8 != 0 {
		t.Error("the count of hot frames is not aligned to 8 bytes")
	}
}

func TestFailedReadReachesAllWaitersAndIsNotCached(t *testing.T) {
	r := newRig(t, 64)
	const readers = 8
	entered, release := make(chan struct{}), make(chan struct{})
	r.disk.gate = func(ID) { close(entered); <-release }
	r.disk.fail = func(ID) error { return errDisk }
	var failed atomic.Int64
	var wg sync.WaitGroup
	for range readers {
		wg.Go(func() {
			s := r.registry.Slot()
			defer s.Free()
			if errors.Is(visit(r.Cache, s, 7, Default), errDisk) {
				failed.Add(1)
			}
		})
	}
	<-entered
	r.waitJoined(readers - 1)
	close(release)
	wg.Wait()
	if failed.Load() != readers || r.disk.loads.Load() != 1 {
		t.Errorf("%d of %d readers failed, with %d reads", failed.Load(), readers, r.disk.loads.Load())
	}
	if r.has(7) {
		t.Error("a failed read was cached")
	}
	r.disk.gate, r.disk.fail = nil, nil
	r.get(t, 7, Default)
}

// waitJoined waits until n misses have waited for reads of other goroutines.
func (c *Cache) waitJoined(n uint64) {
	for c.Stats().Joined < n {
		sleep()
	}
}

func TestConcurrentMissesReadAPageOnce(t *testing.T) {
	r := newRig(t, 64)
	const readers = 8
	release := make(chan struct{})
	r.disk.gate = func(ID) { <-release }
	var wg sync.WaitGroup
	for i := range readers {
		wg.Go(func() {
			s := r.registry.Slot()
			defer s.Free()
			s.Enter()
			defer s.Leave()
			if i%2 == 0 {
				if p, err := r.Page(5, Default); err != nil || pageError(p, 5) != nil {
					t.Error(err, pageError(p, 5))
				}
				return
			}
			var out [2][]byte
			if err := r.Pages([]ID{5, 6}, Default, out[:], new(Visitor)); err != nil || pageError(out[0], 5) != nil || pageError(out[1], 6) != nil {
				t.Error(err)
			}
		})
	}
	r.waitJoined(readers - 1)
	close(release)
	wg.Wait()
	if n := r.disk.loads.Load(); n != 2 {
		t.Errorf("two pages took %d reads", n)
	}
}

func TestContainsDoesNotIncrementTheUsageCount(t *testing.T) {
	r := newRig(t, 64)
	r.get(t, 1, VeryHigh)
	before := r.fingerprint()
	for range 10 {
		if !r.has(1) || r.has(2) {
			t.Fatal("Contains must find page 1 and not page 2")
		}
	}
	if r.fingerprint() != before {
		t.Error("Contains wrote something")
	}
}

func TestUncacheableIDsAreReadAndNotCached(t *testing.T) {
	r := newRig(t, 64)
	for _, id := range []ID{0, idMax + 1, ^ID(0)} {
		r.get(t, id, Default)
		if r.has(id) {
			t.Errorf("page %d is cached", id)
		}
	}
	r.get(t, idMax, Default)
	if !r.has(idMax) {
		t.Error("the largest id is not cached")
	}
	if at := uintptr(unsafe.Pointer(unsafe.SliceData(heapPage(testPageSize)))); at%heapAlign != 0 {
		t.Error("a page on the heap is not aligned for direct I/O")
	}
	if s := r.Stats(); s.Uncached != 3 {
		t.Errorf("%+v", s)
	}
}

func TestHitsAllocateNothing(t *testing.T) {
	r := newRig(t, 64)
	ids, out := []ID{1, 2, 3}, make([][]byte, 3)
	op := func() {
		r.slot.Enter()
		_, _ = r.Page(1, Default)
		_ = r.Pages(ids, Default, out, new(Visitor))
		r.slot.Leave()
	}
	op()
	if n := testing.AllocsPerRun(100, op); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestMissesSoonAllocateNothing(t *testing.T) {
	r := newRig(t, 1024)
	random := rand.New(rand.NewPCG(1, 1))
	op := func() { r.get(t, ID(random.Uint32N(100_000)+1), Default) }
	for range 10_000 {
		op()
	}
	if n := testing.AllocsPerRun(1000, op); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestEveryVisitIsAHitOrAMiss: the reader counts hits, the cache counts misses.
func TestEveryVisitIsAHitOrAMiss(t *testing.T) {
	r := newRig(t, 64)
	for range 3 {
		for id := range ID(10) {
			r.get(t, id+1, Default)
		}
	}
	r.visitor.Hits.Flush()
	if hits, misses := r.visitor.Hits.Count(), r.Stats().Misses; hits != 20 || misses != 10 {
		t.Fatalf("%d hits and %d misses, want 20 and 10", hits, misses)
	}
	r.slot.Enter()
	defer r.slot.Leave()
	out := make([][]byte, 4)
	if err := r.Pages([]ID{9, 10, 11, 12}, Default, out, &r.visitor); err != nil {
		t.Fatal(err)
	}
	r.visitor.Hits.Flush()
	if hits, misses := r.visitor.Hits.Count(), r.Stats().Misses; hits != 22 || misses != 12 {
		t.Fatalf("%d hits and %d misses after a batch, want 22 and 12", hits, misses)
	}
}

// TestVisitsWithoutWaitingReadNothing: a visitor that does not wait gets what is in memory, and reads
// nothing else.
func TestVisitsWithoutWaitingReadNothing(t *testing.T) {
	r := newRig(t, 32)
	r.slot.Enter()
	defer r.slot.Leave()
	if _, err := r.Visit(1, Default, &r.visitor); err != nil {
		t.Fatal(err)
	}
	r.visitor.NoWait = true
	if p, err := r.Visit(1, Default, &r.visitor); err != nil || pageError(p, 1) != nil {
		t.Errorf("a page in memory: %v", err)
	}
	if _, err := r.Visit(2, Default, &r.visitor); err != ErrWouldWait {
		t.Errorf("another page: %v", err)
	}
	var out [2][]byte
	if err := r.Pages([]ID{1, 2}, Default, out[:], &r.visitor); err != ErrWouldWait {
		t.Errorf("a batch: %v", err)
	}
	if n := r.Stats().Misses; n != 1 {
		t.Errorf("%d misses", n)
	}
	r.visitor.NoWait = false
	if err := r.Pages([]ID{1, 2}, Default, out[:], &r.visitor); err != nil || pageError(out[1], 2) != nil {
		t.Errorf("a batch that waits: %v", err)
	}
}

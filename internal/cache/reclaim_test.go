package cache

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func sleep() { time.Sleep(100 * time.Microsecond) }

// TestEvictedFrameWaitsForItsReaders keeps a page while the cache replaces all its pages many
// times.
func TestEvictedFrameWaitsForItsReaders(t *testing.T) {
	r := newRig(t, 64)
	other := r.registry.Slot()
	defer other.Free()
	other.Enter()
	held, err := r.Page(1, VeryLow)
	if err != nil {
		t.Fatal(err)
	}
	for id := range ID(10_000) {
		r.get(t, 100+id, Default)
	}
	if r.has(1) {
		t.Fatal("page 1 was not evicted: the test shows nothing")
	}
	if err := pageError(held, 1); err != nil {
		t.Error(err)
	}
	if s := r.Stats(); s.Uncached == 0 || s.Retired > 64/reserveShareMax {
		t.Errorf("a reader that stays inside should cause a bounded number of retired frames: %+v", s)
	}
	other.Leave()
	before := r.Stats().Uncached
	for id := range ID(1_000) {
		r.get(t, 100+id, Default)
	}
	if s := r.Stats(); s.Uncached != before {
		t.Errorf("frames did not come back after the reader left: %+v", s)
	}
}

// TestMissesBesideALongReaderTakeTheTimeOfAnyMiss: while a reader stays inside its guard, as one of a large value does, no frame of a cache comes
// back, and a miss looks neither at all frames that wait, which may be millions, nor at all slots, which may be thousands.
func TestMissesBesideALongReaderTakeTheTimeOfAnyMiss(t *testing.T) {
	const frames, size = 1 << 16, 16
	r := &rig{disk: new(disk), registry: newRegistry()}
	c, err := New(Config{Bytes: frames * size, PageSize: size, Registry: r.registry, Read: r.disk.load, ReadBatch: r.disk.loadBatch})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s, long := r.registry.Slot(), r.registry.Slot()
	for range 10_000 {
		r.registry.Slot()
	}
	id := ID(0)
	fastest := func(misses int) time.Duration {
		best := time.Hour
		for range misses {
			id++
			start := time.Now()
			if err := visit(c, s, id, Default); err != nil {
				t.Fatal(err)
			}
			best = min(best, time.Since(start))
		}
		return best
	}
	alone := fastest(frames + 1000)
	long.Enter()
	fastest(100)
	beside := fastest(200)
	if n := c.Stats().Retired; n != frames/reserveShareMax || beside > 25*alone {
		t.Errorf("a miss takes %v, and %v with %d frames that wait", alone, beside, n)
	}
	long.Leave()
}

// TestBatchLargerThanTheCacheDoesNotHang also checks that a batch keeps all its pages until its
// reader leaves.
func TestBatchLargerThanTheCacheDoesNotHang(t *testing.T) {
	r := newRig(t, framesMin)
	ids, out := make([]ID, 10*framesMin), make([][]byte, 10*framesMin)
	for round := range ID(5) {
		for i := range ids {
			ids[i] = round*3 + ID(i) + 1
		}
		r.slot.Enter()
		if err := r.Pages(ids, Default, out, new(Visitor)); err != nil {
			t.Fatal(err)
		}
		for i, id := range ids {
			if err := pageError(out[i], id); err != nil {
				t.Fatal(err)
			}
		}
		r.slot.Leave()
	}
	if s := r.Stats(); s.Uncached == 0 {
		t.Errorf("%+v", s)
	}
}

func TestBatchReadsItsMissesInOneSubmission(t *testing.T) {
	r := newRig(t, 1024)
	for id := range ID(32) {
		r.get(t, id+1, Default)
	}
	ids, out := make([]ID, 64), make([][]byte, 64)
	for i := range ids {
		ids[i] = ID(i + 1)
	}
	r.slot.Enter()
	defer r.slot.Leave()
	if err := r.Pages(ids, Default, out, new(Visitor)); err != nil {
		t.Fatal(err)
	}
	if b, n := r.disk.batches.Load(), r.disk.loads.Load(); b != 1 || n != 64 {
		t.Errorf("%d submissions, %d reads", b, n)
	}
}

func TestBatchWithAFailureCachesTheRest(t *testing.T) {
	r := newRig(t, 64)
	r.disk.fail = func(id ID) error {
		if id == 2 {
			return errDisk
		}
		return nil
	}
	out := make([][]byte, 4)
	r.slot.Enter()
	defer r.slot.Leave()
	if err := r.Pages([]ID{1, 2, 3, 3}, Default, out, new(Visitor)); err != errDisk {
		t.Errorf("error %v", err)
	}
	if !r.has(1) || r.has(2) || !r.has(3) || out[1] != nil {
		t.Error("the wrong pages are cached")
	}
}

func TestInvalidatedPageIsNotServedAgain(t *testing.T) {
	r := newRig(t, 64)
	r.slot.Enter()
	old, err := r.Page(9, Default)
	if err != nil {
		t.Fatal(err)
	}
	r.disk.versions.Store(ID(9), uint64(1))
	r.Invalidate(9, 10)
	fresh, err := r.Page(9, Default)
	if err != nil || fresh[8] != 1 || old[8] != 0 {
		t.Errorf("error %v, old page of version %d, new one of version %d", err, old[8], fresh[8])
	}
	r.slot.Leave()
}

// TestInvalidateReachesReadsUnderWay frees a page while it is being read: a reader that asked before
// gets the old page, a later reader does not.
func TestInvalidateReachesReadsUnderWay(t *testing.T) {
	r := newRig(t, 64)
	entered, release := make(chan struct{}, 2), make(chan struct{})
	r.disk.gate = func(ID) { entered <- struct{}{}; <-release }
	var wg sync.WaitGroup
	wg.Go(func() {
		s := r.registry.Slot()
		defer s.Free()
		if err := visit(r.Cache, s, 9, Default); err != nil {
			t.Error(err)
		}
	})
	<-entered
	r.Invalidate(9)
	close(release)
	wg.Wait()
	if r.has(9) {
		t.Error("a page that was freed while it was read is cached")
	}
}

func TestAdmittedPageReplacesWhatWasThere(t *testing.T) {
	r := newRig(t, 64)
	r.get(t, 3, Default)
	page := make([]byte, testPageSize)
	fill(page, 3, 5)
	if !r.Admit(3, page, Default) {
		t.Fatal("Admit found no free frame")
	}
	loads := r.disk.loads.Load()
	r.slot.Enter()
	defer r.slot.Leave()
	p, err := r.Page(3, Default)
	if err != nil || p[8] != 5 || r.disk.loads.Load() != loads {
		t.Errorf("error %v, version %d, %d reads", err, p[8], r.disk.loads.Load()-loads)
	}
}

func TestPrefetchedPagesAreUsedOrWasted(t *testing.T) {
	r := newRig(t, 256)
	var busy atomic.Bool
	p := NewPrefetcher(r.Cache, unless(busy.Load))
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	ids := make([]ID, 100)
	for i := range ids {
		ids[i] = ID(i + 1)
	}
	p.Request(0, ids, Default)
	for r.Stats().Prefetched < 100 {
		sleep()
	}
	for id := range ID(60) {
		r.get(t, id+1, Default)
	}
	for id := range ID(1000) {
		r.get(t, 1000+id, Default)
	}
	s := r.Stats()
	if s.PrefetchedUsed != 60 || s.PrefetchedWasted != 40 || r.disk.batches.Load() != 4 {
		t.Errorf("%d batches, %+v", r.disk.batches.Load(), s)
	}
	busy.Store(true)
	p.Request(0, ids, Default)
	for p.Dropped() < 100 {
		sleep()
	}
	cancel()
	wg.Wait()
	for range 2 * requestMax {
		p.Request(0, ids, Default)
	}
	if got := p.Dropped(); got != 100+100*requestMax {
		t.Errorf("%d pages dropped", got)
	}
}

// TestPrefetchLeavesRoomForItsOwnPages requests more than the cache holds: later pages must not
// evict the pages that were read before them.
func TestPrefetchLeavesRoomForItsOwnPages(t *testing.T) {
	r := newRig(t, 128)
	ids := make([]ID, 300)
	for i := range ids {
		ids[i] = ID(i + 1)
	}
	if r.Prefetch(ids, Default) {
		t.Error("there is room for more than the cache holds")
	}
	s := r.Stats()
	if s.Prefetched != 64 || s.Evicted != 0 || s.Uncached != 0 {
		t.Errorf("%+v", s)
	}
	for _, id := range ids[:s.Prefetched] {
		if !r.has(id) {
			t.Errorf("page %d is gone", id)
		}
	}
}

func TestResizeGivesAndTakesFrames(t *testing.T) {
	r := newRig(t, 256)
	random := seeded(t)
	sizes := []int64{64, 512, 16, 700, 256}
	for _, frames := range sizes {
		for range 5000 {
			r.get(t, ID(random.Uint32N(1000)+1), Default)
		}
		if err := r.Resize(frames * testPageSize); err != nil {
			t.Fatal(err)
		}
		for range 5000 {
			r.get(t, ID(random.Uint32N(1000)+1), Default)
		}
		if s := r.Stats(); s.Frames != uint64(frames) || s.Resident+s.Retired > uint64(frames) || s.Resident < uint64(frames)*3/4 {
			t.Errorf("%d frames: %+v", frames, s)
		}
		if err := r.check(); err != nil {
			t.Fatal(err)
		}
	}
	for _, bytes := range []int64{0, -1, (framesMin - 1) * testPageSize, 1 << 62} {
		if err := r.Resize(bytes); err == nil {
			t.Errorf("resized to %d bytes", bytes)
		}
	}
}

// TestShrinkingFreesMemoryOnceItsReadersHaveLeft looks at a page above the new size. The page
// reads as zeros when its memory is freed.
func TestShrinkingFreesMemoryOnceItsReadersHaveLeft(t *testing.T) {
	const frames = 2 * machinePageBytesMax / testPageSize
	r := newRig(t, frames)
	for id := range ID(frames) {
		r.get(t, id+1, Default)
	}
	other := r.registry.Slot()
	defer other.Free()
	other.Enter()
	behind := r.frame(frames - 2)
	if err := r.Resize(framesMin * testPageSize); err != nil {
		t.Fatal(err)
	}
	if behind[0] == 0 {
		t.Error("memory was freed while a reader used it")
	}
	other.Leave()
	for id := range ID(10) {
		r.get(t, 1000+id, Default)
	}
	if behind[0] != 0 {
		t.Error("memory was not freed")
	}
}

func TestReplacedTableStaysWhileItsReadersAreInside(t *testing.T) {
	r := newRig(t, 256)
	r.get(t, 1, Default)
	other := r.registry.Slot()
	defer other.Free()
	other.Enter()
	old := r.table.Load()
	if err := r.Resize(1024 * testPageSize); err != nil {
		t.Fatal(err)
	}
	if _, ok := old.lookup(1); !ok || len(r.oldTables) != 1 {
		t.Errorf("%d old tables", len(r.oldTables))
	}
	other.Leave()
	if err := r.Resize(256 * testPageSize); err != nil {
		t.Fatal(err)
	}
	if len(r.oldTables) != 0 {
		t.Errorf("%d old tables are left", len(r.oldTables))
	}
}

// TestStorm runs readers of all kinds, writers that free and rewrite pages, prefetching and
// resizing on one small cache. The bytes of every page are checked while its reader is inside, and
// a page that was rewritten must never again be seen in its old state.
func TestStorm(t *testing.T) {
	const pages, rounds = 400, 3000
	r := newRig(t, 64)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	ctx, cancel := context.WithCancel(t.Context())
	var busy atomic.Int64
	p := NewPrefetcher(r.Cache, unless(func() bool { return busy.Add(1)%5 == 0 }))
	var background, readers sync.WaitGroup
	background.Go(func() { p.Run(ctx) })
	background.Go(func() { r.rewrite(ctx, rand.New(rand.NewPCG(seed, 1)), pages) })
	background.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			if err := r.Resize([]int64{64, 16, 200, 40}[i%4] * testPageSize); err != nil {
				t.Error(err)
			}
			time.Sleep(2 * time.Millisecond)
		}
	})
	for g := range uint64(4) {
		readers.Go(func() { r.readers(t, p, rand.New(rand.NewPCG(seed, 2+g)), pages, rounds) })
	}
	readers.Wait()
	cancel()
	background.Wait()
	t.Logf("%+v", r.Stats())
}

// rewrite frees pages and gives them new contents. A tree does so only after no reader that knows
// the old contents can ask for them.
func (r *rig) rewrite(ctx context.Context, random *rand.Rand, pages uint32) {
	page := make([]byte, testPageSize)
	for ctx.Err() == nil {
		id := ID(random.Uint32N(pages) + 1)
		version := r.disk.version(id) + 1
		r.disk.versions.Store(id, version)
		switch random.IntN(4) {
		case 0, 1:
			r.Invalidate(id)
		case 2:
			fill(page, id, version)
			r.Admit(id, page, Default)
		default:
			fill(page, id, version)
			r.Replace(ID(random.Uint32N(pages)+1), id, page, Default)
		}
		time.Sleep(20 * time.Microsecond)
	}
}

func (r *rig) readers(t *testing.T, p *Prefetcher, random *rand.Rand, pages uint32, rounds int) {
	s := r.registry.Slot()
	defer s.Free()
	ids, out := make([]ID, 0, 24), make([][]byte, 24)
	for range rounds {
		ids = ids[:0]
		first := random.Uint32N(pages - 24)
		for i := range random.IntN(23) + 1 {
			ids = append(ids, ID(first+uint32(i)+1))
		}
		h := Hint(random.IntN(int(hints)))
		s.Enter()
		switch random.IntN(4) {
		case 0:
			if err := r.Pages(ids, h, out[:len(ids)], new(Visitor)); err != nil {
				t.Error(err)
			}
		case 1:
			p.Request(0, ids, h)
			fallthrough
		default:
			ids = ids[:min(3, len(ids))]
			for i, id := range ids {
				var err error
				if out[i], err = r.Page(id, h); err != nil {
					t.Error(err)
				}
			}
		}
		for i, id := range ids {
			if err := pageError(out[i], id); err != nil {
				t.Error(err)
			}
		}
		s.Leave()
	}
}

// unless is a guard that refuses while the function reports true.
type unless func() bool

func (busy unless) Enter(uint64) bool { return !busy() }
func (busy unless) Leave()            {}

package pager

import (
	"context"
	"errors"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestStateSurvivesReopen(t *testing.T) {
	for _, size := range []int{512, 4096, 8192, 65536} {
		mem := vfs.NewMem()
		y := createToy(t, mem, size)
		must(t, y.checkpoint(7, []int{0, 1, 5}, nil, 100))
		must(t, y.checkpoint(9, []int{1, 2}, []int{0}, 200))
		must(t, y.audit())
		must(t, y.p.Close())

		y, err := openToy(mem)
		must(t, err)
		if want := map[int]uint64{1: 200, 2: 200, 5: 100}; !maps.Equal(y.contents(), want) {
			t.Fatalf("page size %d: got %v, want %v", size, y.contents(), want)
		}
		if s := y.p.State(); s.Epoch != 9 || y.p.Checkpoint() != 3 || y.p.SuperblockDamage() != nil {
			t.Fatalf("page size %d: epoch %d, checkpoint %d, fell back %v", size, s.Epoch, y.p.Checkpoint(), y.p.SuperblockDamage())
		}
		must(t, y.p.Close())
	}
}

func TestCreateRefusesWhatIsThere(t *testing.T) {
	mem := vfs.NewMem()
	must(t, createToy(t, mem, 512).p.Close())
	if _, err := Create(mem, toyFile, Options{PageSize: 512}); !errors.Is(err, fs.ErrExist) {
		t.Fatalf("second Create: %v", err)
	}
	if _, err := Create(mem, "other", Options{PageSize: 1000}); err == nil {
		t.Fatal("page size 1000 was accepted")
	}
	if _, err := Open(mem, toyFile, Options{PageSize: 4096}); !errors.Is(err, ErrPageSize) {
		t.Fatalf("wrong page size: %v", err)
	}
}

// TestPendingPagesWaitForSuperblockAndReaders frees a page and checks when its id is allocated again.
func TestPendingPagesWaitForSuperblockAndReaders(t *testing.T) {
	y := createToy(t, vfs.NewMem(), 512)
	must(t, y.checkpoint(1, []int{0}, nil, 1))
	old := y.leaves[0].id
	must(t, y.checkpoint(2, []int{0}, nil, 2)) // frees old
	freedBy := y.p.Checkpoint()
	for i := range 5 {
		must(t, y.checkpoint(uint64(3+i), []int{1 + i}, nil, 3))
		if buf := make([]byte, 512); y.p.ReadPage(old, buf) != nil {
			t.Fatalf("page %d was written over while readers may want it", old)
		}
	}
	y.p.ReuseAllFreed(freedBy - 1)
	must(t, y.checkpoint(10, []int{10}, nil, 4))
	if y.leaves[10].id == old {
		t.Fatal("handed out although only older checkpoints were released")
	}
	y.p.ReuseAllFreed(freedBy)
	must(t, y.checkpoint(11, []int{11, 12, 13}, nil, 5))
	for _, l := range y.leaves {
		if l.id == old {
			return
		}
	}
	if y.root != old {
		t.Fatalf("page %d never came back: %v", old, y.leaves)
	}
}

func TestAbortLeavesNothing(t *testing.T) {
	mem := vfs.NewMem()
	y := createToy(t, mem, 512)
	must(t, y.checkpoint(1, []int{0, 1, 2}, nil, 1))
	before := y.p.Stats()
	ck, err := y.p.Begin()
	must(t, err)
	if _, err := y.p.Begin(); !errors.Is(err, ErrBusy) {
		t.Fatalf("second Begin: %v", err)
	}
	_, _, err = y.build(ck, []int{0, 1, 2, 3, 4}, nil, 2)
	must(t, err)
	ck.Abort()
	must(t, y.audit())
	if after := y.p.Stats(); after.Live != before.Live || after.Pending != before.Pending {
		t.Fatalf("before %+v, after %+v", before, after)
	}
	must(t, y.checkpoint(2, []int{3}, nil, 3))
	must(t, y.p.Close())
	y, err = openToy(mem)
	must(t, err)
	if want := map[int]uint64{0: 1, 1: 1, 2: 1, 3: 3}; !maps.Equal(y.contents(), want) {
		t.Fatalf("got %v, want %v", y.contents(), want)
	}
}

func TestCancelledCommitLeavesOldState(t *testing.T) {
	mem := vfs.NewMem()
	y := createToy(t, mem, 512)
	must(t, y.checkpoint(1, []int{0}, nil, 1))
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	ck, err := y.p.Begin()
	must(t, err)
	_, root, err := y.build(ck, []int{0}, nil, 2)
	must(t, err)
	if err := ck.Commit(ctx, State{Root: root}); !errors.Is(err, context.Canceled) {
		t.Fatalf("Commit: %v", err)
	}
	if err := ck.Commit(context.Background(), State{Root: root}); !errors.Is(err, ErrEnded) {
		t.Fatalf("Commit after the end: %v", err)
	}
	must(t, y.audit())
	must(t, y.checkpoint(2, []int{1}, nil, 3))
}

// TestOnlyTakenPagesAreWritten: nothing that a state reaches can be overwritten by mistake.
func TestOnlyTakenPagesAreWritten(t *testing.T) {
	y := createToy(t, vfs.NewMem(), 512)
	must(t, y.checkpoint(1, []int{0}, nil, 1))
	ck, err := y.p.Begin()
	must(t, err)
	defer ck.Abort()
	for _, id := range []page.ID{0, 1, y.root, y.leaves[0].id, 1000} {
		if _, err := ck.Writer().Page(id); err == nil {
			t.Fatalf("page %d could be written", id)
		}
	}
}

// TestBrokenCallersStopTheStore: a double free or a dead root must not become durable.
func TestBrokenCallersStopTheStore(t *testing.T) {
	for name, breakIt := range map[string]func(y *toy, ck *Checkpoint) page.ID{
		"double free":          func(y *toy, ck *Checkpoint) page.ID { ck.Free(y.root, y.root); return 0 },
		"free of a free page":  func(_ *toy, ck *Checkpoint) page.ID { ck.Free(99); return 0 },
		"free of a superblock": func(_ *toy, ck *Checkpoint) page.ID { ck.Free(1); return 0 },
		"dead root":            func(y *toy, ck *Checkpoint) page.ID { ck.Free(y.root); return y.root },
		"unwritten root":       func(_ *toy, ck *Checkpoint) page.ID { return ck.AllocExtent(50).First + 40 },
		"unflushed writer": func(y *toy, ck *Checkpoint) page.ID {
			_, _ = ck.Writer().Page(ck.AllocExtent(1).First)
			return y.root
		},
	} {
		t.Run(name, func(t *testing.T) {
			mem := vfs.NewMem()
			y := createToy(t, mem, 512)
			must(t, y.checkpoint(1, []int{0}, nil, 1))
			ck, err := y.p.Begin()
			must(t, err)
			root := breakIt(y, ck)
			if err := ck.Commit(context.Background(), State{Root: root}); !errors.Is(err, ErrBroken) || !errors.Is(err, ErrFailed) {
				t.Fatalf("Commit: %v", err)
			}
			if _, err := y.p.Begin(); !errors.Is(err, ErrFailed) {
				t.Fatalf("Begin afterwards: %v", err)
			}
			must(t, y.p.Close())
			y, err = openToy(mem)
			must(t, err)
			if len(y.leaves) != 1 {
				t.Fatalf("the broken state became durable: %v", y.leaves)
			}
		})
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestCommitCostIsProportionalToChange: a small checkpoint of a large file writes a few pages, not the whole map.
func TestCommitCostIsProportionalToChange(t *testing.T) {
	p, err := Create(vfs.NewMem(), toyFile, Options{PageSize: 512})
	must(t, err)
	const pages = 40_000 // eleven leaves of the map
	var root page.ID
	write := func(n int) (written uint64) {
		before := p.Stats().PagesWritten
		ck, err := p.Begin()
		must(t, err)
		w := ck.Writer()
		for range n {
			id := ck.AllocExtent(1).First
			buf, err := w.Page(id)
			must(t, err)
			page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: id, Checkpoint: ck.Number()})
			page.Seal(buf)
			root = id
		}
		must(t, w.Flush())
		must(t, ck.Commit(context.Background(), State{Root: root}))
		return p.Stats().PagesWritten - before
	}
	write(pages)
	for range 10 {
		if n := write(1); n > 1+1+2 { // itself, the map's root, the leaves for its location and for the map's own
			t.Fatalf("a checkpoint of one page wrote %d", n)
		}
	}
}

// TestAFileIsSearchedOnceForRunsThatItDoesNotHave: a file of many holes is passed over once in a checkpoint for the values that fit into none of
// them, and what is found is always the lowest run.
func TestAFileIsSearchedOnceForRunsThatItDoesNotHave(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	live := newLive()
	for i := superblocks; i < 4000; i += 1 + rng.IntN(20) {
		for range 1 + rng.IntN(3) {
			live.Add(i)
			i++
		}
	}
	s := newSpace(live)
	var taken []Extent
	for range 2000 {
		least, end := 1+rng.IntN(30), int(s.end())
		n := least + rng.IntN(8)
		first, found := s.busy.Run(0, least, end)
		e, ok := s.takeHole(n, least)
		if ok != found || ok && int(e.First) != first {
			t.Fatalf("a run of %d pages at %d (%v), expected at %d (%v)", least, e.First, ok, first, found)
		}
		if !ok && s.lowest(least) < end {
			t.Fatalf("the next search for %d pages begins at %d of %d again", least, s.lowest(least), end)
		}
		if ok {
			taken = append(taken, e)
		}
		home := page.ID(rng.IntN(end))
		if free := s.freeFrom(home); int(free) != s.busy.NextAbsent(int(home)) {
			t.Fatalf("the first free page from %d on is %d", home, free)
		}
		if i := rng.IntN(len(taken) + 1); i < len(taken) && rng.IntN(3) == 0 {
			s.giveBack(taken[i])
			taken[i] = Extent{}
		}
	}
	if s.broken != nil {
		t.Fatal(s.broken)
	}
}

// TestACommitDoesNotAskForEachPageWhetherItIsFree: the page for a copy of the superblock is searched while a bulk load holds all latches, also in a file
// of a terabyte without holes.
func TestACommitDoesNotAskForEachPageWhetherItIsFree(t *testing.T) {
	const words = 1 << 19
	live := new(bitset.Set)
	for i := range words {
		live.SetWord(i, math.MaxUint64)
	}
	s := newSpace(live)
	fastest := func(search func()) time.Duration {
		best := time.Hour
		for range 5 {
			start := time.Now()
			search()
			best = min(best, time.Since(start))
		}
		return best
	}
	bits := fastest(func() { s.busy.NextAbsent(0) })
	if took := fastest(func() { s.freeFrom(copyHome(8192)) }); took > time.Millisecond+20*bits || s.freeFrom(0) != 64*words {
		t.Errorf("%v for the search of a free page, and %v for that of a bit", took, bits)
	}
}

// TestAnOlderMapIsDamage: a device that has lost the last write of the map leaves an older one in its place, which says that pages of the state are
// free.
func TestAnOlderMapIsDamage(t *testing.T) {
	mem := vfs.NewMem()
	y := createToy(t, mem, 512)
	for epoch := range uint64(2) {
		must(t, y.checkpoint(epoch+1, []int{int(epoch)}, nil, 7))
	}
	lost := y.p.current().allocation.Page
	older := vfs.AlignedBuffer(512)
	must(t, y.p.ReadPage(lost, older))
	h := page.ReadHeader(older)
	h.Checkpoint--
	page.PutHeader(older, h)
	older[arrPayload] &^= 1 << 5
	page.Seal(older)
	_, err := y.p.file.WriteAt(older, y.p.offset(lost))
	must(t, errors.Join(err, y.p.Close()))
	if _, err := openToy(mem); !errors.Is(err, ErrCorrupt) {
		t.Errorf("opened with a map of the checkpoint before: %v", err)
	}
}

// TestAbortNamesItsPagesLastFirst: a cache undoes what it did for them in the opposite order.
func TestAbortNamesItsPagesLastFirst(t *testing.T) {
	mem := vfs.NewMem()
	must(t, createToy(t, mem, 512).p.Close())
	var named []page.ID
	p, err := Open(mem, toyFile, Options{OnAbort: func(id page.ID) { named = append(named, id) }})
	must(t, err)
	y := &toy{p: p, leaves: map[int]toyLeaf{}}
	ck, err := p.Begin()
	must(t, err)
	_, _, err = y.build(ck, []int{1, 2, 3}, nil, 1)
	must(t, err)
	want := slices.Clone(ck.written)
	ck.Abort()
	slices.Reverse(want)
	if !slices.Equal(named, want) || len(want) < 4 {
		t.Errorf("pages %v, want %v", named, want)
	}
	must(t, p.Close())
}

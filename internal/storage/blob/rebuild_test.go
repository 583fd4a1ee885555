package blob

import (
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// eachPage calls its argument for the intact pages of the file that wanted reports true for.
func (b *bag) eachPage(wanted func(page.ID) bool, each func(id page.ID, buf []byte)) error {
	buf := vfs.AlignedBuffer(b.p.PageSize())
	for id := b.p.PageCount() - 1; id > 0; id-- { // any order serves
		if wanted(id) && b.p.ReadPage(id, buf) == nil {
			each(id, buf)
		}
	}
	return nil
}

// wholly is of tests in which the pages of blobs can be read.
func wholly() Known { return KnownLive }

func (b *bag) eachRef(each func(page.Ref) error) (complete bool, err error) {
	for _, r := range b.refs {
		if err := each(r); err != nil {
			return false, err
		}
	}
	return true, nil
}

// abort writes the pages of a checkpoint, and does not commit it.
func (b *bag) abort(c change) error {
	ck, err := b.p.Begin()
	if err != nil {
		return err
	}
	defer ck.Abort()
	_, _, err = b.build(ck, b.s.Begin(ck), c)
	return err
}

// TestRebuiltTableFindsEveryCopyOfAFragment: a checkpoint that was aborted, or that a crash ended, leaves pages with
// blob ids that the next one uses for other values, and both have the same number. A table that is made from all pages
// of the file gives the value that the reference means.
func TestRebuiltTableFindsEveryCopyOfAFragment(t *testing.T) {
	for seed := range uint64(40) {
		b := mustCreate(t, vfs.NewMem(), 512)
		rng := rand.New(rand.NewPCG(seed, 3))
		want := map[int]string{}
		for _, c := range churn(seed, 12, 30, 2500) {
			lost := maps.Clone(c)
			for range rng.IntN(20) {
				lost[100+rng.IntN(30)-60*rng.IntN(2)] = value(rng.IntN(100), 9, rng.IntN(2500))
			}
			must(t, b.abort(lost))
			must(t, b.checkpoint(c))
			want = c.apply(want)
			b.p.ReuseAllFreed(b.p.Checkpoint())
			s, err := Rebuild(&b.p.Reader, func(each func(id page.ID, buf []byte)) error {
				return b.eachPage(func(page.ID) bool { return true }, each)
			})
			must(t, err)
			if err := checkContents(&bag{p: b.p, s: s, refs: b.refs}, want); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		must(t, b.p.Close())
	}
}

// TestRepairedTableIsExact: a table that is made from the live pages of a state has the locations that the state has,
// also when one checkpoint has moved a fragment twice.
func TestRepairedTableIsExact(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	b.relocate = 300
	rng := rand.New(rand.NewPCG(1, 3))
	first, second := change{}, change{}
	for i := range 600 {
		first[i] = value(i, 0, 480+rng.IntN(800))
		if i < 400 {
			second[i] = nil
		}
	}
	want := map[int]string{}
	for _, c := range []change{first, second, {}, {}, {}, {}} {
		must(t, b.checkpoint(c))
		want = c.apply(want)
		b.p.ReuseAllFreed(b.p.Checkpoint())
		s, err := Repair(&b.p.Reader, func(_ *bitset.Set, each func(id page.ID, buf []byte)) error {
			return b.eachPage(b.p.IsLive, each)
		}, b.p.IsLive, b.eachRef, wholly)
		must(t, err)
		must(t, checkContents(&bag{p: b.p, s: s, refs: b.refs}, want))
		for id := range b.s.state.Slots {
			if p := b.s.table.locationOf(id); p.live() && p != s.table.locationOf(id) {
				t.Fatalf("blob %d is at %#x, and at %#x after the repair", id, p, s.table.locationOf(id))
			}
		}
	}
	must(t, b.p.Close())
}

// TestADoubtfulTableHasOnlyWhatLeavesConfirm: the device cannot read one blob page. Every id stays in use; a fragment to which no leaf refers has no
// location, because it may be an older copy, and a later drop would free pages of other blobs; and no read returns a wrong value.
func TestADoubtfulTableHasOnlyWhatLeavesConfirm(t *testing.T) {
	faulty := vfs.NewFaulty(vfs.NewMem())
	b := mustCreate(t, faulty, 512)
	want := map[int]string{}
	for _, c := range churn(1, 8, 40, 2500) {
		must(t, b.checkpoint(c))
		want = c.apply(want)
		b.p.ReuseAllFreed(b.p.Checkpoint())
	}
	for id := range b.p.PageCount() {
		if b.s.fill.of(id) == 0 {
			continue
		}
		fault := faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: bagFile, Fault: vfs.Unreadable, Bytes: int(id) * b.p.PageSize(), Err: syscall.EIO})
		for _, leaves := range []bool{true, false} {
			s, err := Repair(&b.p.Reader, func(_ *bitset.Set, each func(id page.ID, buf []byte)) error {
				return b.eachPage(b.p.IsLive, each)
			}, b.p.IsLive, func(each func(page.Ref) error) (bool, error) {
				if !leaves {
					return false, nil
				}
				return b.eachRef(each)
			}, wholly)
			must(t, err)
			if !s.Doubtful() {
				t.Fatalf("page %d: the table is not doubtful", id)
			}
			for blob := range s.state.Slots {
				if at := s.table.locationOf(blob); at == 0 || !leaves && !at.missing() {
					t.Fatalf("page %d: id %d is at %#x; leaves were read: %v", id, blob, at, leaves)
				}
			}
			for name, r := range b.refs {
				v, err := s.Append(nil, r, s.Direct())
				if !errors.Is(err, pager.ErrCorrupt) && (err != nil || string(v) != want[name]) {
					t.Fatalf("page %d: value %d: %d bytes, %v", id, name, len(v), err)
				}
			}
		}
		fault.Remove()
	}
	must(t, b.p.Close())
}

// TestARebuildThatCannotReadALeafKeepsEveryID: the leaf may refer to any of them, and may be readable again. An audit then finds every
// value, and takes ids without a blob for no damage. Each value has pages of its own, so that none is left of those that are dropped.
func TestARebuildThatCannotReadALeafKeepsEveryID(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	put, drop := change{}, change{}
	for i := range 40 {
		if put[i] = value(i, 0, 400); i%3 == 0 {
			drop[i] = nil
		}
	}
	want := map[int]string{}
	for _, c := range []change{put, drop, {}, {}} {
		must(t, b.checkpoint(c))
		want = c.apply(want)
		b.p.ReuseAllFreed(b.p.Checkpoint())
	}
	for _, complete := range []bool{true, false} {
		s, err := Repair(&b.p.Reader, func(_ *bitset.Set, each func(id page.ID, buf []byte)) error {
			return b.eachPage(b.p.IsLive, each)
		}, b.p.IsLive, func(each func(page.Ref) error) (bool, error) {
			for name, r := range b.refs {
				if complete || name%2 == 0 {
					if err := each(r); err != nil {
						return false, err
					}
				}
			}
			return complete, nil
		}, wholly)
		must(t, err)
		free := 0
		for id := range s.state.Slots {
			if s.table.locationOf(id) == 0 {
				free++
			}
		}
		if complete != (free > 0) {
			t.Errorf("%d ids are free, all leaves were read: %v", free, complete)
		}
		again := &bag{p: b.p, s: s, refs: b.refs, index: b.index}
		must(t, again.audit())
		must(t, checkContents(again, want))
	}
	must(t, b.p.Close())
}

// TestRepairTakesNoCopyThatContinuesInAForeignFragment: a checkpoint that was aborted has moved values and divided them, with ids for the second
// parts that the state does not have, or has given to other values. Such a copy reads as the value, as long as its pages are there.
func TestRepairTakesNoCopyThatContinuesInAForeignFragment(t *testing.T) {
	for _, seed := range []uint64{8, 20, 240, 1500, 1855} {
		b := mustCreate(t, vfs.NewMem(), 512)
		rng := rand.New(rand.NewPCG(seed, 3))
		random := func(n int) change { return randomChange(rng, n) }
		want, all := map[int]string{}, func(page.ID) bool { return true }
		for range 12 {
			for range 1 + rng.IntN(3) {
				must(t, b.abort(random(5+rng.IntN(40))))
			}
			c := random(1 + rng.IntN(20))
			must(t, b.checkpoint(c))
			want = c.apply(want)
			b.p.ReuseAllFreed(b.p.Checkpoint())
			s, err := Repair(&b.p.Reader, func(_ *bitset.Set, each func(id page.ID, buf []byte)) error {
				return b.eachPage(all, each)
			}, all, b.eachRef, wholly)
			must(t, err)
			if err := checkContents(&bag{p: b.p, s: s, refs: b.refs}, want); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
		}
		must(t, b.p.Close())
	}
}

// TestAnEntryThatIsReplacedStaysACopy: it may be the right one of another blob, whose reference comes later.
func TestAnEntryThatIsReplacedStaysACopy(t *testing.T) {
	s := &Store{table: newTable(), copies: newCopies()}
	first, second := makeLocation(5, 0, 1, fragmentHead), makeLocation(6, 0, 1, fragmentHead)
	for _, at := range []location{first, second, first, second} {
		s.enterCopy(3, at)
		if s.table.locationOf(3) != at {
			t.Fatalf("%v was entered, and %v is there", at, s.table.locationOf(3))
		}
	}
	if all := s.locationsOf(3); !slices.Contains(all, first) || !slices.Contains(all, second) || len(all) > 3 {
		t.Errorf("the copies are %v", all)
	}
}

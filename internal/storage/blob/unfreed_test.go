package blob

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// unreadableFS fails reads that reach a page of 512 bytes.
type unreadableFS struct {
	vfs.FS
	bad    map[page.ID]bool
	passes int // failed reads after which all pages can be read; none if it is zero
	failed int
}

type unreadableFile struct {
	vfs.File
	fs *unreadableFS
}

func (u *unreadableFS) Open(name string, mode vfs.Mode) (vfs.File, error) {
	f, err := u.FS.Open(name, mode)
	return unreadableFile{f, u}, err
}

func (f unreadableFile) fails(off int64) bool {
	if !f.fs.bad[page.ID(off/512)] {
		return false
	}
	if f.fs.failed++; f.fs.failed == f.fs.passes {
		f.fs.bad = nil
	}
	return true
}

func (f unreadableFile) ReadAt(p []byte, off int64) (int, error) {
	if f.fails(off) {
		return 0, vfs.ErrDevice
	}
	return f.File.ReadAt(p, off)
}

func (f unreadableFile) ReadBatch(reqs []vfs.Request) error {
	err := f.File.ReadBatch(reqs)
	for i := range reqs {
		if f.fails(reqs[i].Offset) {
			reqs[i].Err = vfs.ErrDevice
			err = reqs[i].Err
		}
	}
	return err
}

// fragmentPages are the pages with the fragments of a value.
func (b *bag) fragmentPages(t *testing.T, name int) (pages map[page.ID]bool) {
	t.Helper()
	ref, err := decodeRef(b.refs[name])
	must(t, err)
	at := b.s.table.locationOf(ref.id)
	return map[page.ID]bool{at.page(): true}
}

// dropAll drops values in a checkpoint that is committed, or not.
func (b *bag) dropAll(t *testing.T, commits, ahead bool, names ...int) {
	t.Helper()
	ck, err := b.p.Begin()
	must(t, err)
	defer ck.Abort()
	batch := b.s.Begin(ck)
	var refs []page.Ref
	for _, name := range names {
		refs = append(refs, b.refs[name])
	}
	if ahead {
		batch.ReadAhead(refs)
	}
	for _, r := range refs {
		must(t, batch.Drop(r))
	}
	must(t, batch.Finish(t.Context(), 0))
	if !commits {
		return
	}
	must(t, ck.Commit(t.Context(), pager.State{Epoch: 1, Root: b.index[0]}))
	for _, name := range names {
		delete(b.refs, name)
	}
}

// TestAPassingReadErrorLosesNoSpace: a value is dropped while the device fails a page that it needs. Once the page can be read, in the same
// checkpoint or in a later one, the value is freed.
func TestAPassingReadErrorLosesNoSpace(t *testing.T) {
	for _, length := range []int{700, 300 + 512*9} { // whole pages and a head
		for _, ahead := range []bool{false, true} {
			for _, passes := range []int{1, 2, 0} {
				t.Run(fmt.Sprintf("length=%d,ahead=%v,passes=%d", length, ahead, passes), func(t *testing.T) {
					fs := &unreadableFS{FS: vfs.NewMem()}
					b := mustCreate(t, fs, 512)
					must(t, b.checkpoint(change{0: value(0, 0, length), 1: value(1, 0, 40)}))
					must(t, b.audit())
					fs.bad, fs.passes = b.fragmentPages(t, 0), passes
					b.dropAll(t, true, ahead, 0)
					if fs.failed == 0 {
						t.Fatal("no read failed")
					}
					if n := b.s.FailedDrops(); n == 0 {
						t.Error("the damage was not counted")
					}
					later := passes != 1
					if n := b.s.Stats().Unfreed; (n == 1) != later {
						t.Fatalf("%d values are not freed", n)
					}
					fs.bad = nil
					if later {
						b.dropAll(t, false, false) // what an aborted checkpoint frees stays
						b.dropAll(t, true, false)
					}
					must(t, b.audit())
					if st := b.s.Stats(); st.Unfreed != 0 || st.Blobs != 1 {
						t.Errorf("left: %+v", st)
					}
					must(t, b.checkpoint(change{0: value(0, 1, length), 1: nil}))
					must(t, b.audit())
					must(t, b.p.Close())
				})
			}
		}
	}
}

// TestPassingReadErrorsLoseNothing: random checkpoints, each beside some pages that cannot be read, and some that are aborted. Once all pages can be read, all
// values are there, and the accounts are right.
func TestPassingReadErrorsLoseNothing(t *testing.T) {
	seen := uint64(0)
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 0))
		fs := &unreadableFS{FS: vfs.NewMem()}
		b := mustCreate(t, fs, 512)
		want := map[int]string{}
		for range 40 {
			c := randomChange(rng, 12)
			if name := rng.IntN(40); rng.IntN(2) == 0 {
				c[name] = value(name, rng.IntN(100), 500+rng.IntN(3000))
			}
			fs.bad, fs.failed, fs.passes = map[page.ID]bool{}, 0, rng.IntN(3)
			for name := range b.refs {
				if rng.IntN(8) == 0 {
					maps.Copy(fs.bad, b.fragmentPages(t, name))
				}
			}
			if rng.IntN(4) == 0 {
				ck, err := b.p.Begin()
				must(t, err)
				_, _, err = b.build(ck, b.s.Begin(ck), c)
				ck.Abort()
				must(t, err)
				continue
			}
			must(t, b.checkpoint(c))
			want = c.apply(want)
			seen = max(seen, b.s.Stats().Unfreed)
			b.p.ReuseAllFreed(b.p.Checkpoint())
		}
		fs.bad = nil
		for range 2 * unfreedPauseMax {
			must(t, b.checkpoint(nil))
		}
		if n := b.s.Stats().Unfreed; n != 0 {
			t.Errorf("seed %d: %d values are not freed", seed, n)
		}
		if err := errors.Join(b.audit(), checkContents(b, want)); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		must(t, b.p.Close())
	}
	if seen < 3 {
		t.Errorf("at most %d values were not freed at once", seen)
	}
}

// TestACutValueIsFreedLater: where its second fragment is, its first one tells.
func TestACutValueIsFreedLater(t *testing.T) {
	fs := &unreadableFS{FS: vfs.NewMem()}
	b := mustCreate(t, fs, 512)
	all := change{}
	for i := range 20 {
		all[i] = value(i, 0, 300)
	}
	must(t, b.checkpoint(all))
	for name := range all {
		ref, err := decodeRef(b.refs[name])
		must(t, err)
		if !b.s.table.locationOf(ref.id).continued() {
			continue
		}
		fs.bad = b.fragmentPages(t, name)
		b.dropAll(t, true, true, name)
		if n := b.s.Stats().Unfreed; n != 1 || fs.failed == 0 {
			t.Fatalf("%d values are not freed, %d reads failed", n, fs.failed)
		}
		fs.bad = nil
		b.dropAll(t, true, false)
		must(t, b.audit())
		must(t, b.p.Close())
		return
	}
	t.Fatal("no value was cut")
}

// TestAPageWithAnotherValueIsNotTriedAgain: it was read. Later its ids may be those of other values.
func TestAPageWithAnotherValueIsNotTriedAgain(t *testing.T) {
	mem := vfs.NewMem()
	b := mustCreate(t, mem, 512)
	must(t, b.checkpoint(change{0: value(0, 0, 700), 1: value(1, 0, 40)}))
	f, err := mem.Open(bagFile, vfs.ReadWrite)
	must(t, err)
	for id := range b.fragmentPages(t, 0) {
		buf := make([]byte, 512)
		d := newBlobPage(buf, id, 1)
		d.add(0, fragmentWhole, value(0, 0, 40))
		d.seal()
		_, err = f.WriteAt(buf, int64(id)*512)
		must(t, err)
	}
	must(t, f.Close())
	b.dropAll(t, true, false, 0)
	if st := b.s.Stats(); st.Unfreed != 0 || st.Blobs != 2 || b.s.FailedDrops() != 1 {
		t.Errorf("%+v, %d drops failed", st, b.s.FailedDrops())
	}
	must(t, b.p.Close())
}

// TestADropThatIsNotCommittedIsNotTriedAgain: the value is in use.
func TestADropThatIsNotCommittedIsNotTriedAgain(t *testing.T) {
	fs := &unreadableFS{FS: vfs.NewMem()}
	b := mustCreate(t, fs, 512)
	want := change{0: value(0, 0, 700), 1: value(1, 0, 40)}
	must(t, b.checkpoint(want))
	fs.bad = b.fragmentPages(t, 0)
	b.dropAll(t, false, true, 0)
	fs.bad = nil
	b.dropAll(t, true, false)
	must(t, b.audit())
	must(t, checkContents(b, want.apply(nil)))
	must(t, b.p.Close())
}

// TestPagesThatStayUnreadableCostFewReads: batches ask for them after ever more checkpoints. Values whose pages can be read are freed nevertheless.
func TestPagesThatStayUnreadableCostFewReads(t *testing.T) {
	fs := &unreadableFS{FS: vfs.NewMem()}
	b := mustCreate(t, fs, 512)
	all, names := change{-1: value(1, 0, 40)}, []int(nil)
	for i := range 100 {
		all[i] = value(i, 0, 700)
		names = append(names, i)
	}
	must(t, b.checkpoint(all))
	fs.bad = map[page.ID]bool{}
	for _, name := range names {
		for id := range b.fragmentPages(t, name) {
			fs.bad[id] = true
		}
	}
	lost := map[page.ID]bool{}
	for _, name := range names[50:] { // those that are tried first
		maps.Copy(lost, b.fragmentPages(t, name))
	}
	b.dropAll(t, true, true, names...)
	if n := b.s.Stats().Unfreed; n != 100 {
		t.Fatalf("%d values are not freed", n)
	}
	fs.bad = lost
	for range 8 {
		b.dropAll(t, true, false)
	}
	left := b.s.Stats().Unfreed
	if left < 50 || left > 54 {
		t.Fatalf("%d values are not freed", left)
	}
	fs.failed = 0
	for range 200 {
		b.dropAll(t, true, false)
	}
	if fs.failed == 0 || fs.failed > 8*unfreedAtOnce || b.s.Stats().Unfreed != left {
		t.Errorf("200 checkpoints have met them %d times; %d values are not freed, %d before", fs.failed, b.s.Stats().Unfreed, left)
	}
	fs.bad = nil
	for range unfreedPauseMax + 1 {
		b.dropAll(t, true, false)
	}
	must(t, b.audit())
	must(t, b.p.Close())
}

// TestTheValuesThatAreNotFreedHaveABound: more of them are forgotten, as all are when the process ends.
func TestTheValuesThatAreNotFreedHaveABound(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	ck, err := b.p.Begin()
	must(t, err)
	defer ck.Abort()
	batch := b.s.Begin(ck)
	for range unfreedMax + 1 {
		batch.keepUnfreed(page.Ref{})
	}
	if n := len(batch.unfreed.refs); n != unfreedMax {
		t.Errorf("%d values are remembered", n)
	}
}

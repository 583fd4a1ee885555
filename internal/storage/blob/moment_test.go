package blob

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// start opens a bag as the engine does, and rebuilds what cannot be read: map and table both if hidden.
func start(fs vfs.FS, refs *bag, hidden bool) (*bag, error) {
	p, err := pager.Open(fs, bagFile, pager.Options{RebuildMap: true})
	if err != nil {
		return nil, err
	}
	if hidden {
		p.DistrustMap(errors.New("unreadable for a moment"))
	}
	b := &bag{p: p, refs: refs.refs, index: refs.index}
	may := func(id page.ID) bool { return id < p.PageCount() && (p.MapDamage() != nil || p.IsLive(id)) }
	if b.s, err = Open(&p.Reader); err != nil || hidden {
		if p.MapDamage() != nil {
			p.DistrustTable()
		}
		b.s, err = Repair(&p.Reader, func(but *bitset.Set, each func(id page.ID, buf []byte)) error {
			return b.eachPage(func(id page.ID) bool { return may(id) && !but.Has(int(id)) }, each)
		}, may, b.eachRef, wholly)
	}
	if err != nil || p.MapDamage() == nil {
		return b, err
	}
	return b, p.RebuildMap(func(each func(page.ID) error) (bool, error) {
		for _, id := range b.index {
			if err := each(id); err != nil {
				return false, err
			}
		}
		return b.s.Reach(each)
	})
}

// sameState makes another checkpoint of the state, as the engine does with what it has repaired.
func (b *bag) sameState() error {
	ck, err := b.p.Begin()
	if err != nil {
		return err
	}
	defer ck.Abort()
	if err := b.s.Begin(ck).Finish(context.Background(), 0); err != nil {
		return err
	}
	return ck.Commit(context.Background(), b.p.State())
}

// TestTablesThatWereUnreadableForAMoment: map and table of a state are intact, but a start cannot read them, and takes other copies of values than
// the state has. It is killed in its first checkpoint, before or after that has overwritten what the state has. The next start can read
// the device, and finds every value, also if that one or another one could not.
func TestTablesThatWereUnreadableForAMoment(t *testing.T) {
	others, kills := 0, 0
	for _, seed := range []uint64{3, 52, 153, 234, 270, 372} {
		fs := vfs.NewMem()
		b := mustCreate(t, fs, 512)
		rng := rand.New(rand.NewPCG(seed, 3))
		random := func(n int) change { return randomChange(rng, n) }
		want := map[int]string{}
		for range 12 {
			for range rng.IntN(3) {
				must(t, b.abort(random(5+rng.IntN(40))))
			}
			c := random(1 + rng.IntN(20))
			must(t, b.checkpoint(c))
			want = c.apply(want)
			b.p.ReuseAllFreed(b.p.Checkpoint())
		}
		for k := int64(1); ; k++ {
			what := fmt.Sprintf("seed %d, killed at mutation %d", seed, k)
			copied := fs.Crash(1, vfs.SurviveAll)
			first, err := start(copied, b, true)
			must(t, err)
			must(t, checkContents(first, want))
			for id := range b.s.state.Slots {
				if at := b.s.table.locationOf(id); k == 1 && at.live() && at != first.s.table.locationOf(id) {
					others++
				}
			}
			copied.CrashAt(copied.Mutations() + k)
			if k%2 == 0 {
				_ = first.sameState()
			} else {
				_ = first.checkpoint(change{1: value(1, 1, 300), 2: value(2, 2, 300), 3: value(3, 3, 3000)})
			}
			_ = first.p.Close()
			if !copied.Crashed() {
				break
			}
			kills++
			left := copied.Crash(seed+uint64(k), []vfs.Survival{vfs.SurviveAll, vfs.SurviveSome}[k/2%2])
			for _, hidden := range []bool{false, true} {
				next, err := start(left.Crash(1, vfs.SurviveAll), b, hidden)
				if err == nil && next.p.Checkpoint() == b.p.Checkpoint() {
					err = checkContents(next, want)
				}
				if err == nil && next.p.Checkpoint() == b.p.Checkpoint() { // nothing is lost or twice when that start has written what it has
					must(t, next.sameState())
					err = errors.Join(next.audit(), checkContents(next, want))
				}
				if err != nil {
					t.Fatalf("%s; hidden again: %v: %v", what, hidden, err)
				}
				must(t, next.p.Close())
			}
		}
		_ = b.p.Close()
	}
	if others == 0 || kills < 50 {
		t.Errorf("%d values were found in another copy, with %d kills", others, kills)
	}
}

// TestRepairTakesNoValueFromTheRootOfTheMap: the device has lost the write of that page, which still has an older copy of values. The repair of
// the map overwrites it.
func TestRepairTakesNoValueFromTheRootOfTheMap(t *testing.T) {
	fs := vfs.NewMem()
	b := mustCreate(t, fs, 512)
	want := map[int]string{}
	for _, c := range churn(1, 4, 40, 2500) {
		must(t, b.checkpoint(c))
		want = c.apply(want)
		b.p.ReuseAllFreed(b.p.Checkpoint())
	}
	for of := range b.p.PageCount() {
		if b.s.fill.of(of) == 0 {
			continue
		}
		copied := fs.Crash(1, vfs.SurviveAll)
		f, err := copied.Open(bagFile, vfs.ReadWrite)
		must(t, err)
		root, buf := b.p.MapRoot(), make([]byte, b.p.PageSize())
		_, err = f.ReadAt(buf, int64(of)*int64(len(buf)))
		must(t, err)
		h := page.ReadHeader(buf)
		h.ID, h.Checkpoint = root, b.p.Checkpoint() // the newest copy
		page.PutHeader(buf, h)
		page.Seal(buf)
		_, err = f.WriteAt(buf, int64(root)*int64(len(buf)))
		must(t, err)
		must(t, f.Close())
		next, err := start(copied, b, true)
		must(t, err)
		must(t, next.sameState())
		if err := errors.Join(next.audit(), checkContents(next, want)); err != nil {
			t.Errorf("the root has page %d: %v", of, err)
		}
		must(t, next.p.Close())
	}
	_ = b.p.Close()
}

package blob

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestALeafThatCannotBeReadOwnsOnlyWhatIsItsOwn: the leaf comes back, and its values are dropped by what the rebuilt table says. The second fragment of
// such a value must be none that the state has for another one. The table is made from all pages of the file, some of checkpoints that were aborted.
func TestALeafThatCannotBeReadOwnsOnlyWhatIsItsOwn(t *testing.T) {
	hidden, readable, cut := 0, 0, 0
	for seed := range uint64(80) {
		eachAbortedState(t, seed, func(_ *rand.Rand, b *bag, want map[int]string) {
			s := rebuiltWithoutLeaf(t, b, 0, KnownAll)
			h, r, c := checkHidden(t, b, s, want)
			hidden, readable, cut = hidden+h, readable+r, cut+c
			for name := range b.refs {
				if ref, _ := decodeRef(b.refs[name]); name%3 == 0 && s.table.locationOf(ref.id).continued() {
					checkSecondOwner(t, seed, b, s, ref.id)
				}
			}
		})
	}
	if readable < hidden*9/10 || cut < hidden/10 {
		t.Errorf("of %d values of the leaf %d can be read, and %d continue", hidden, readable, cut)
	}
}

// TestALeafBesideAPageThatCannotBeReadHasItsWholeValues: a second fragment may be a value of its own on the page. Others compare nothing but themselves.
func TestALeafBesideAPageThatCannotBeReadHasItsWholeValues(t *testing.T) {
	hidden, readable := 0, 0
	for seed := range uint64(20) {
		eachAbortedState(t, seed, func(rng *rand.Rand, b *bag, want map[int]string) {
			s := rebuiltWithoutLeaf(t, b, page.ID(2+rng.IntN(int(b.p.PageCount())-2)), KnownPartly)
			h, r, cut := checkHidden(t, b, s, want)
			hidden, readable = hidden+h, readable+r
			if cut > 0 {
				t.Errorf("seed %d: %d values of the leaf continue", seed, cut)
			}
		})
	}
	if readable < hidden/2 {
		t.Errorf("of %d values of the leaf %d can be read", hidden, readable)
	}
}

// eachAbortedState calls do after each of some checkpoints, between which others were aborted. Many of the values are cut.
func eachAbortedState(t *testing.T, seed uint64, do func(rng *rand.Rand, b *bag, want map[int]string)) {
	t.Helper()
	b := mustCreate(t, vfs.NewMem(), 512)
	rng := rand.New(rand.NewPCG(seed, 3))
	random := func() change {
		c := change{}
		for range 1 + rng.IntN(12) {
			name := rng.IntN(40)
			c[name] = value(name, rng.IntN(1000), []int{302, 302, 260, 400, 2000}[rng.IntN(5)])
			if rng.IntN(4) == 0 {
				c[name] = nil
			}
		}
		return c
	}
	want := map[int]string{}
	for range 10 {
		for range rng.IntN(3) {
			must(t, b.abort(random()))
		}
		c := random()
		must(t, b.checkpoint(c))
		want = c.apply(want)
		b.p.ReuseAllFreed(b.p.Checkpoint())
		do(rng, b, want)
	}
	must(t, b.p.Close())
}

// rebuiltWithoutLeaf rebuilds the table from all pages of the file but one. A third of the references cannot be read.
func rebuiltWithoutLeaf(t *testing.T, b *bag, but page.ID, known Known) *Store {
	t.Helper()
	s, err := Repair(&b.p.Reader, func(_ *bitset.Set, each func(id page.ID, buf []byte)) error {
		return b.eachPage(func(id page.ID) bool { return id != but }, each)
	}, func(page.ID) bool { return true }, func(each func(page.Ref) error) (bool, error) {
		for name, r := range b.refs {
			if name%3 > 0 {
				if err := each(r); err != nil {
					return false, err
				}
			}
		}
		return false, nil
	}, func() Known { return known })
	must(t, err)
	return s
}

// checkHidden reads all values, and counts those whose references could not be read, those of them that can be read now, and those that continue.
func checkHidden(t *testing.T, b *bag, s *Store, want map[int]string) (hidden, readable, cut int) {
	t.Helper()
	for name, r := range b.refs {
		v, err := s.Append(nil, r, s.Direct())
		if !errors.Is(err, pager.ErrCorrupt) && (err != nil || string(v) != want[name]) {
			t.Fatalf("value %d: %d bytes, %v", name, len(v), err)
		}
		if name%3 > 0 {
			continue
		}
		hidden++
		if err == nil {
			readable++
		}
		if ref, _ := decodeRef(r); s.table.locationOf(ref.id).continued() {
			cut++
		}
	}
	return hidden, readable, cut
}

// checkSecondOwner compares the fragment in which blob id continues in a rebuilt table with the state.
func checkSecondOwner(t *testing.T, seed uint64, b *bag, s *Store, id uint64) {
	t.Helper()
	second := func(s *Store, id uint64) (uint64, bool) {
		at := s.table.locationOf(id)
		if !at.continued() {
			return 0, false
		}
		fragment, err := s.readFragment(id, at, s.Direct())
		must(t, err)
		return binary.LittleEndian.Uint64(fragment.data), true
	}
	taken, _ := second(s, id)
	for name, r := range b.refs {
		ref, _ := decodeRef(r)
		own, cut := second(b.s, ref.id)
		if ref.id == taken || cut && own == taken && ref.id != id {
			t.Errorf("seed %d: blob %d continues in fragment %d, which value %d has", seed, id, taken, name)
		}
	}
}

package btree

import (
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// fires expects that a check reports a broken invariant: as an error, or as a panic in builds with
// the tag `invariants`.
func fires(t *testing.T, what string, check func() error) {
	t.Helper()
	defer func() {
		if r := recover(); r != nil {
			if err, ok := r.(error); !ok || !errors.Is(err, ErrInvariant) {
				t.Errorf("%s: panicked with %v", what, r)
			}
		}
	}()
	if err := check(); !errors.Is(err, ErrInvariant) {
		t.Errorf("%s: %v; expected a broken invariant", what, err)
	}
}

func TestMergeReportsBrokenInvariants(t *testing.T) {
	entry := func(key string, e keys.Epoch, same bool) page.Entry {
		return page.Entry{Key: []byte(key), Trailer: keys.MakeTrailer(e, keys.KindSet), Same: same}
	}
	separator := func(key string) page.Separator {
		return page.Separator{Key: []byte(key), Trailer: page.NoTrailer}
	}
	a9, a9Again, b5 := entry("a", 9, false), entry("a", 9, true), entry("b", 5, false)
	fires(t, "versions that do not descend", func() error { return checkNext(&a9, &a9Again) })
	early, late := separator("a"), separator("c")
	fires(t, "a separator before the left neighbour", func() error { return checkCut(&a9, &early, &b5) })
	fires(t, "a separator after the right neighbour", func() error { return checkCut(&a9, &late, &b5) })
	fires(t, "a leaf that begins before its bound", func() error {
		r := leafRegion{bound: late}
		r.draft.Add(&b5, page.SizeMin)
		return checkLeaf(nil, &r)
	})
	fires(t, "children that do not ascend", func() error {
		r := nodeRegion{children: []page.Child{{Separator: late, ID: 7}}}
		return r.checkChild(1, &page.Child{Separator: late, ID: 8})
	})
	fires(t, "an empty extent", func() error { return checkExtent(5, 0, 4) })
	fires(t, "an extent that is too long", func() error { return checkExtent(5, 5, 4) })
	fires(t, "an entry that was lost", func() error {
		w := worker{balance: balance{read: 3, skipped: 1}, pack: leafPacker{packed: 1}}
		return w.checkBalance()
	})
}

// TestBrokenInvariantEndsTheMerge: a sink that returns an empty extent would make the merge use
// pages that are not its own.
func TestBrokenInvariantEndsTheMerge(t *testing.T) {
	s := newStore(page.SizeMin)
	in := s.mergeInput(Root{}, numbered(1, 100, 1, 8), Policy{})
	in.Sink = emptySink{}
	fires(t, "a merge with an empty extent", func() error {
		_, err := Merge(t.Context(), in)
		return err
	})
}

type emptySink struct{}

func (emptySink) AllocExtent(int) (page.ID, int, error) { return 9, 0, nil }
func (emptySink) WritePage(page.ID, []byte) error       { return nil }

// TestCheckingACutAllocatesNothing: there is one for each leaf.
func TestCheckingACutAllocatesNothing(t *testing.T) {
	left, right := page.Entry{Key: []byte("a"), Trailer: keys.MakeTrailer(1, keys.KindSet)}, page.Entry{Key: []byte("b"), Trailer: keys.MakeTrailer(1, keys.KindSet)}
	allocated := testing.AllocsPerRun(100, func() {
		bound := page.Separator{Key: right.Key, Trailer: page.NoTrailer}
		if err := checkCut(&left, &bound, &right); err != nil {
			t.Error(err)
		}
	})
	if allocated != 0 {
		t.Errorf("%v allocations for a cut", allocated)
	}
}

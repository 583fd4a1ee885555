package btree

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestRangeOfAnAvoidedPageDoesNotGrow: every key of leaves beside damaged pages is deleted, and no snapshot needs the
// tombstones. The keys read as absent, not as damaged, and can be written again without the damaged pages.
func TestRangeOfAnAvoidedPageDoesNotGrow(t *testing.T) {
	const last = 1 << 20
	for _, c := range []struct {
		name     string
		bad      []int // leaves
		from, to int   // leaves whose keys are deleted
		again    bool  // a second merge deletes the rest
	}{
		{"the leaf after it", []int{1}, 2, 3, false},
		{"three leaves after it", []int{1}, 2, 5, false},
		{"one after the other", []int{1}, 2, 4, true},
		{"all leaves after it", []int{1}, 2, last, false},
		{"leaves between two of them", []int{1, 4}, 2, 4, false},
		{"the first leaf of the tree", []int{1}, 0, 1, false},
		{"the first leaves of the tree", []int{3}, 0, 3, true},
		{"after a partition", []int{partitionLeaves - 1}, partitionLeaves, last, false},
		{"after an inner node", []int{40}, 41, last, true},
	} {
		t.Run(c.name, func(t *testing.T) { deleteBeside(t, c.bad, c.from, c.to, c.again) })
	}
}

func deleteBeside(t *testing.T, bad []int, from, to int, again bool) {
	s := newStore(512)
	var sets, deletes []Entry
	for i := range 2000 {
		sets = append(sets, Entry{Key: fmt.Appendf(nil, "k%04d", i), Trailer: keys.MakeTrailer(keys.Epoch(i+1), keys.KindSet), Value: []byte("value")})
	}
	root := s.apply(t, s.mergeInput(Root{}, sets, Policy{})).Root
	leaves := leavesOf(t, s, root)
	d := &damaged{s: s, bad: map[page.ID]struct{}{}, avoid: Avoided{}}
	for _, i := range bad {
		d.bad[leaves[i].ID] = struct{}{}
		d.avoid[leaves[i].ID] = &leaves[i+1].Separator
	}
	to = min(to, len(leaves))
	for i := range sets {
		key := sets[i].Key
		if leaves[from].Compare(key, 0) <= 0 && (to == len(leaves) || leaves[to].Compare(key, 0) > 0) {
			deletes = append(deletes, Entry{Key: key, Trailer: keys.MakeTrailer(3000, keys.KindDelete)})
		}
	}
	policy := Policy{MinVisible: 4000}
	parts := [][]Entry{deletes}
	if again {
		parts = [][]Entry{deletes[:len(deletes)/2], deletes[len(deletes)/2:]}
	}
	for _, part := range append(parts, nil) {
		res, err := d.attempt(t, d.in(root, part, policy))
		if err != nil {
			t.Fatal(err)
		}
		root = res.Root
	}
	for _, e := range deletes {
		if v, found, err := Get(badSource{s, d.bad}, root, e.Key, keys.MaxEpoch); err != nil || found && v.Kind.HasValue() {
			t.Fatalf("%s: %v, %v", e.Key, found, err)
		}
	}
	if n := len(leavesOf(t, s, root)); n > len(leaves)-(to-from)+len(bad) {
		t.Errorf("%d leaves of %d are left after all keys of %d were deleted", n, len(leaves), to-from)
	}
	var anew []Entry
	for _, e := range deletes {
		anew = append(anew, Entry{Key: e.Key, Trailer: keys.MakeTrailer(5000, keys.KindSet), Value: []byte("new")})
	}
	res, err := d.attempt(t, d.in(root, anew, policy))
	if err != nil {
		t.Fatalf("input for the range: %v", err)
	}
	for _, e := range anew {
		if v, found, err := Get(badSource{s, d.bad}, res.Root, e.Key, keys.MaxEpoch); err != nil || !found || v.Epoch != 5000 {
			t.Fatalf("%s: %v, %v", e.Key, found, err)
		}
	}
}

// leavesOf lists the leaves of a tree, in key order.
func leavesOf(t *testing.T, src Source, root Root) (leaves []page.Child) {
	t.Helper()
	var visit func(c page.Child, level int)
	visit = func(c page.Child, level int) {
		if level == 0 {
			leaves = append(leaves, c)
			return
		}
		children, err := readChildren(src, c, level)
		if err != nil {
			t.Fatal(err)
		}
		for _, g := range children {
			visit(g, level-1)
		}
	}
	visit(page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: root.ID}, root.Level)
	return leaves
}

// TestRangeOfADamagedPageMayGrowUntilItIsAvoided: before a merge knows that a page is damaged, the keys of a leaf that
// disappears get into its range. What is written there names the page, with the wider range.
func TestRangeOfADamagedPageMayGrowUntilItIsAvoided(t *testing.T) {
	s := newStore(512)
	var sets, deletes []Entry
	for i := range 100 {
		sets = append(sets, Entry{Key: fmt.Appendf(nil, "k%03d", i), Trailer: keys.MakeTrailer(keys.Epoch(i+1), keys.KindSet), Value: []byte("value")})
	}
	root := s.apply(t, s.mergeInput(Root{}, sets, Policy{})).Root
	leaves := leavesOf(t, s, root)
	for i := range sets {
		if key := sets[i].Key; leaves[2].Compare(key, 0) <= 0 && leaves[3].Compare(key, 0) > 0 {
			deletes = append(deletes, Entry{Key: key, Trailer: keys.MakeTrailer(200, keys.KindDelete)})
		}
	}
	d := &damaged{s: s, bad: map[page.ID]struct{}{leaves[1].ID: {}}}
	res, err := d.attempt(t, d.in(root, deletes, Policy{MinVisible: 300}))
	if err != nil {
		t.Fatal(err)
	}
	again := []Entry{{Key: deletes[0].Key, Trailer: keys.MakeTrailer(400, keys.KindSet), Value: []byte("new")}}
	var grown *UnreadableError
	if _, err := d.attempt(t, d.in(res.Root, again, Policy{MinVisible: 300})); !errors.As(err, &grown) || grown.Pages[0].ID != leaves[1].ID ||
		grown.Pages[0].Upper.Compare(leaves[3].Key, leaves[3].Trailer) != 0 {
		t.Errorf("input for the range: %v", err)
	}
}

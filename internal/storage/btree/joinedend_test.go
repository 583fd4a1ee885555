package btree

import (
	"fmt"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestJoiningKeepsTheEndOfAnAvoidedPage: a leaf begins where an avoided page ends, between versions of a key that are gone. It keeps that
// bound when an underfull neighbour is joined with it: else keys that are known to be absent would be damaged.
func TestJoiningKeepsTheEndOfAnAvoidedPage(t *testing.T) {
	joined := 0
	for before := range 150 { // for some of them, the two leaves end a partition
		if joinBeside(t, before) {
			joined++
		}
	}
	if joined == 0 {
		t.Error("no leaf was joined with its neighbour")
	}
}

func joinBeside(t *testing.T, before int) (joined bool) {
	s, value := newStore(512), string(make([]byte, 40))
	var entries, deletes []Entry
	for i := range before {
		entries = append(entries, set(fmt.Sprintf("a%03d", i), 1, value))
	}
	for i := range 30 {
		entries = append(entries, set("k", keys.Epoch(130-i), value))
	}
	for i := range 200 {
		entries = append(entries, set(fmt.Sprintf("m%03d", i), 1, value))
	}
	root := s.apply(t, s.mergeInput(Root{}, entries, Policy{})).Root
	leaves := leavesOf(t, s, root)
	last := slices.IndexFunc(leaves, func(c page.Child) bool { return string(c.Key) > "k" }) - 1 // the last leaf that begins between versions of k
	avoided, end := leaves[last-1], leaves[last].Separator
	merge := func(entries []Entry) (after page.Child) {
		in := s.mergeInput(root, entries, Policy{MinVisible: 95, Snapshots: []keys.Epoch{95, 200}})
		in.Avoid = Avoided{avoided.ID: &end}
		root = s.apply(t, in).Root
		leaves = leavesOf(t, s, root)
		last = slices.IndexFunc(leaves, func(c page.Child) bool { return c.ID == avoided.ID }) + 1
		if got := leaves[last].Separator.String(); got != end.String() {
			t.Fatalf("with %d keys before it, the avoided page ends at %s, and not at %v", before, got, end)
		}
		return leaves[last]
	}
	was := merge([]Entry{set("m000", 90, value)}) // no snapshot sees the versions of k in this leaf
	next, end2 := leaves[last+1].Separator, leaves[last+2].Separator
	for _, e := range entries[before+30:] {
		if next.Compare(e.Key, page.NoTrailer) < 0 && end2.Compare(e.Key, page.NoTrailer) > 0 {
			deletes = append(deletes, Entry{Key: e.Key, Trailer: keys.MakeTrailer(91, keys.KindDelete)})
		}
	}
	return merge(deletes[:len(deletes)-1]).ID != was.ID
}

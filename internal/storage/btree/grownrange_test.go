package btree

import (
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestRangeOfAnAvoidedPageGrowsOverEmptyLeaves: every key of the leaf after a damaged page is deleted, and the leaf disappears. Its
// range is then that of the damaged page: reads there are refused, and never wrong, and what is written there names the page again.
func TestRangeOfAnAvoidedPageGrowsOverEmptyLeaves(t *testing.T) {
	s := newStore(512)
	var sets, deletes []Entry
	for i := range 100 {
		e := Entry{Key: fmt.Appendf(nil, "k%03d", i), Trailer: keys.MakeTrailer(keys.Epoch(i+1), keys.KindSet), Value: []byte("value")}
		sets = append(sets, e)
	}
	root := s.apply(t, s.mergeInput(Root{}, sets, Policy{})).Root
	children, err := readChildren(s, page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: root.ID}, root.Level)
	if err != nil || root.Level != 1 || len(children) < 4 {
		t.Fatalf("%d children at level %d, %v", len(children), root.Level, err)
	}
	bad, emptied, next := children[1], children[2], children[3]
	for i := range sets {
		if key := sets[i].Key; emptied.Separator.Compare(key, 0) <= 0 && next.Separator.Compare(key, 0) > 0 {
			deletes = append(deletes, Entry{Key: key, Trailer: keys.MakeTrailer(200, keys.KindDelete)})
		}
	}
	d := &damaged{s: s, bad: map[page.ID]struct{}{bad.ID: {}}, avoid: map[page.ID]struct{}{bad.ID: {}}}
	policy := Policy{MinVisible: 300}
	res, err := d.attempt(t, d.in(root, deletes, policy))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range deletes {
		if _, found, err := Get(badSource{s, d.bad}, res.Root, e.Key, keys.MaxEpoch); found || !errors.Is(err, errBad) {
			t.Errorf("%s: %v, %v", e.Key, found, err)
		}
	}
	again := []Entry{{Key: deletes[0].Key, Trailer: keys.MakeTrailer(400, keys.KindSet), Value: []byte("new")}}
	var grown *UnreadableError
	if _, err := d.attempt(t, d.in(res.Root, again, policy)); !errors.As(err, &grown) || grown.Pages[0].ID != bad.ID ||
		grown.Pages[0].Upper.Compare(next.Separator.Key, next.Separator.Trailer) != 0 {
		t.Errorf("input for the range: %v", err)
	}
}

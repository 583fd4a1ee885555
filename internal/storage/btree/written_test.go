package btree

import (
	"context"
	"slices"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestWrittenNamesTheLeafThatAPageReplaces: it had the first key of the new leaf, or the key before it, and is freed.
func TestWrittenNamesTheLeafThatAPageReplaces(t *testing.T) {
	s := newStore(512)
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 5000, 1, 12), allVisible)).Root
	changed := append(numbered(500, 1000, 2, 40), numbered(3000, 1000, 2, 1)...) // leaves are split, and joined
	in := s.mergeInput(root, changed, allVisible)
	in.Workers = Always(2)
	var mu sync.Mutex
	replaced := map[page.ID]page.ID{}
	in.Written = func(id, old page.ID, p []byte) {
		mu.Lock()
		defer mu.Unlock()
		if page.IsTree(p, 0) != (old != 0) {
			t.Errorf("page %d is in the place of page %d; leaf: %v", id, old, page.IsTree(p, 0))
		}
		replaced[id] = old
	}
	before := map[page.ID][]byte{}
	for id, p := range s.pages {
		before[id] = slices.Clone(p)
	}
	result, err := Merge(context.Background(), in)
	if err != nil {
		t.Fatal(err)
	}
	if n := result.Stats.LeafPages + result.Stats.InnerPages; len(replaced) != n {
		t.Errorf("%d pages of %d were announced", len(replaced), n)
	}
	for id, old := range replaced {
		if old == 0 {
			continue
		}
		if !slices.Contains(result.Freed, old) {
			t.Errorf("page %d replaces page %d, which stays", id, old)
		}
		oldFirst, oldLast := ends(before[old])
		first, last := ends(s.pages[id])
		if first > oldLast || last < oldFirst {
			t.Errorf("page %d from %q to %q replaces page %d from %q to %q", id, first, last, old, oldFirst, oldLast)
		}
	}
}

// ends are the first and the last key of a leaf.
func ends(p []byte) (first, last string) {
	v := page.Leaf(p).Layout()
	prefix := string(v.Prefix())
	return prefix + string(v.Suffix(0)), prefix + string(v.Suffix(v.Count()-1))
}

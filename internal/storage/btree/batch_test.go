package btree

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// Pages implements BatchSource. It overwrites the pages of the previous call, as a caller must
// expect.
func (s *store) Pages(ids []page.ID, level int, pages [][]byte) error {
	for _, p := range s.lent {
		clear(p)
	}
	s.lent = s.lent[:0]
	for i, id := range ids {
		p, err := s.Page(id, level)
		if err != nil {
			return err
		}
		pages[i] = slices.Clone(p)
		s.lent = append(s.lent, pages[i])
	}
	return nil
}

// compareFindAll looks up every key at once, and some that do not exist.
func (w *workload) compareFindAll(t *testing.T, s *store, root Root) {
	t.Helper()
	all := slices.Sorted(maps.Keys(w.m))
	var sorted [][]byte
	for _, k := range all {
		sorted = append(sorted, []byte(k), []byte(k+"\x00no"))
	}
	slices.SortFunc(sorted, bytes.Compare)
	var f Finder
	next := 0
	err := f.FindAll(s, root, sorted, w.frontier, func(i int, v Version, ok bool) error {
		want, has := w.m.at(string(sorted[i]), w.frontier)
		switch {
		case i != next:
			return fmt.Errorf("key %d visited at %d", i, next)
		case ok && (!has || v.Epoch != want.epoch || !bytes.Equal(s.value(t, v), want.value)),
			!ok && has && want.kind.HasValue():
			return fmt.Errorf("%q: found %v at %d, want %d", sorted[i], ok, v.Epoch, want.epoch)
		}
		next++
		return nil
	})
	if err != nil || next != len(sorted) {
		t.Fatalf("%d of %d keys visited: %v", next, len(sorted), err)
	}
}

// TestFindAllFetchesEachPageOnce counts the pages that a window of neighbouring keys needs.
func TestFindAllFetchesEachPageOnce(t *testing.T) {
	s := newStore(512)
	var entries []Entry
	var sorted [][]byte
	for i := range 5000 {
		entries = append(entries, set(fmt.Sprintf("key%06d", i), 1, "value"))
	}
	for i := range FindWindow {
		sorted = append(sorted, entries[1000+i].Key)
	}
	root := s.apply(t, s.mergeInput(Root{}, entries, Policy{})).Root
	s.reads = 0
	var f Finder
	_ = f.FindAll(s, root, sorted, 1, func(int, Version, bool) error { return nil })
	if most := root.Level + 8; s.reads > most {
		t.Fatalf("%d pages read for %d neighbours, want at most %d", s.reads, FindWindow, most)
	}
	if n := testing.AllocsPerRun(10, func() {
		_ = f.FindAll(quiet{s}, root, sorted, 1, func(int, Version, bool) error { return nil })
	}); n > 1 {
		t.Fatalf("%v allocations in a used Finder", n)
	}
}

// quiet is a BatchSource that allocates nothing.
type quiet struct{ s *store }

func (q quiet) Pages(ids []page.ID, _ int, pages [][]byte) error {
	for i, id := range ids {
		pages[i] = q.s.pages[id]
	}
	return nil
}

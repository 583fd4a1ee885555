package inspect

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSalvagePassesOnNoLeafOfAnotherPlace: a device that has lost a write has an older page there, of the same number and with other keys. They come
// out once, and as they are now.
func TestSalvagePassesOnNoLeafOfAnotherPlace(t *testing.T) {
	s := newStore(t)
	s.put(0, 300, 60)
	s.checkpoint()
	s.close()
	state, trees := s.trees()
	older := make([]byte, state.Pages.PageSize())
	if err := errors.Join(state.ReadPage(trees[0][3], older), state.Close()); err != nil {
		t.Fatal(err)
	}
	s.loseLastLeaf()
	s.open()
	s.put(0, 100, 61)
	var w batch.Builder
	for i := range 60 {
		w.Set(keys.SpaceUser, fmt.Appendf(nil, "key-00299-%03d", i), []byte(strings.Repeat("n", 60)))
	}
	s.commit(&w)
	s.checkpoint()
	s.close()

	state, trees = s.trees()
	f, err := s.fs.Open(state.Files.DataPath(), vfs.ReadWrite)
	if err := errors.Join(err, state.Close()); err != nil {
		t.Fatal(err)
	}
	salvage := func(what string) (seen map[string]bool) {
		seen = map[string]bool{}
		if _, err := Salvage(t.Context(), s.fs, "db", func(e *Salvaged) error {
			if seen[string(e.Key)] || string(e.Key) < "key-00100" && len(e.Value) == 60 {
				t.Errorf("%s: %s comes out, with %d bytes; before: %v", what, e.Key, len(e.Value), seen[string(e.Key)])
			}
			seen[string(e.Key)] = true
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		return seen
	}
	whole, was := len(salvage("before")), make([]byte, len(older))
	for i, leaves := range trees {
		for _, id := range []page.ID{leaves[0], leaves[len(leaves)/2]} {
			page.SetID(older, id)
			at := int64(id) * int64(len(older))
			_, err := f.ReadAt(was, at)
			_, failed := f.WriteAt(older, at)
			if err := errors.Join(err, failed); err != nil {
				t.Fatal(err)
			}
			what := fmt.Sprintf("page %d of tree %d", id, i)
			if n := whole - len(salvage(what)); i > 0 && n > 0 || n > 4 {
				t.Errorf("%s: %d keys of %d do not come out", what, n, whole)
			}
			if _, err := f.WriteAt(was, at); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// trees opens a closed store, and lists the leaves of its tree and, if there is one, of the repair tree and its mirror.
func (s *store) trees() (state *storage.DurableState, leaves [3][]page.ID) {
	s.t.Helper()
	state, err := storage.Files{FS: s.fs, Dir: "db"}.OpenState()
	if err != nil {
		s.t.Fatal(err)
	}
	root, mirror, err := state.RepairTreeRoots()
	for i, tree := range []btree.Root{state.Tree(), root, mirror} {
		err = errors.Join(err, btree.Walk(state.Source(), tree, &btree.Visitor{
			Page: func(id page.ID, level int, _ []byte) error {
				if level == 0 {
					leaves[i] = append(leaves[i], id)
				}
				return nil
			},
			Damaged: func(page.ID, int, *page.Separator, *page.Separator, error) error { return nil },
		}))
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return state, leaves
}

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

// TestSalvageKeepsNothingOfTheRepairTree: it may have everything that was written since its page was damaged.
func TestSalvageKeepsNothingOfTheRepairTree(t *testing.T) {
	s := newStore(t)
	s.put(0, 300, 60)
	s.checkpoint()
	s.close()
	s.loseLastLeaf()
	s.open()
	var w batch.Builder
	for i := range 500 {
		w.Set(keys.SpaceUser, fmt.Appendf(nil, "key-00299-%03d", i), []byte(strings.Repeat("n", 60)))
	}
	w.Delete(keys.SpaceUser, []byte("key-00299-500"))
	s.commit(&w)
	s.checkpoint()
	s.close()

	most, got := 0, map[string]int{}
	r := salvager{ctx: t.Context(), files: storage.Files{FS: s.fs, Dir: "db"}, log: map[string]logged{}}
	r.write = func(e *Salvaged) error {
		most = max(most, len(r.log))
		got[string(e.Key)]++
		return nil
	}
	if err := r.run(); err != nil {
		t.Fatal(err)
	}
	for i := range 500 {
		if key := fmt.Sprintf("key-00299-%03d", i); got[key] != 1 {
			t.Fatalf("%s comes out %d times", key, got[key])
		}
	}
	if most > 0 || uint64(len(got)) != r.report.Keys || r.report.LostTotal != 1 {
		t.Errorf("%d of %d keys were kept in memory, %d lost", most, len(got), r.report.LostTotal)
	}
}

// loseLastLeaf destroys the last leaf of the tree of a closed store.
func (s *store) loseLastLeaf() {
	s.t.Helper()
	state, err := storage.Files{FS: s.fs, Dir: "db"}.OpenState()
	if err != nil {
		s.t.Fatal(err)
	}
	var last page.ID
	err = btree.Walk(state.Source(), state.Tree(), &btree.Visitor{Page: func(id page.ID, level int, _ []byte) error {
		if level == 0 {
			last = id
		}
		return nil
	}})
	size := state.Pages.PageSize()
	f, openErr := s.fs.Open(state.Files.DataPath(), vfs.ReadWrite)
	if err := errors.Join(err, openErr, state.Close()); err != nil {
		s.t.Fatal(err)
	}
	_, err = f.WriteAt(make([]byte, size), int64(last)*int64(size))
	if err := errors.Join(err, f.Close()); err != nil {
		s.t.Fatal(err)
	}
}

package enginetest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// repairTreePages lists the intact tree pages of the file that the tree does not have: those of the repair tree and of its
// mirror, and older ones.
func repairTreePages(t testing.TB, fs vfs.FS, pageSize int) (ids []page.ID) {
	t.Helper()
	file, own := readFile(t, fs, dataFile), treePages(t, fs)
	for id := 2; (id+1)*pageSize <= len(file); id++ {
		p := file[id*pageSize : (id+1)*pageSize]
		if page.Check(p, page.ID(id)) == nil && (page.IsTree(p, 0) || page.IsTree(p, 1)) && !slices.Contains(own, page.ID(id)) {
			ids = append(ids, page.ID(id))
		}
	}
	return ids
}

// TestAbandonedRepairTreeLosesNoValue damages one page of the repair tree or of its mirror after the other. A merge meets it and
// abandons that tree; then the root is rebuilt, and the repair tree gives its versions back. No value is lost, also over a
// restart, and the store is sound. If values are outside of leaves, one trace of the damage is left: those of a damaged leaf stay
// allocated (ADR 0018).
func TestAbandonedRepairTreeLosesNoValue(t *testing.T) {
	t.Run("values in leaves", func(t *testing.T) { abandonEach(t, 3) })
	t.Run("large values", func(t *testing.T) { abandonEach(t, 20) })
}

// abandonEach is the test with values of this length and more.
func abandonEach(t *testing.T, repeats int) {
	t.Helper()
	o := modelOptions(vfs.NewMem())
	fs, pageSize := o.Storage.FS, o.Storage.PageSize
	writeWithLarge(t, o, "small, too")
	pages := treePages(t, fs)
	leaf, intact := pages[len(pages)/2], readFile(t, fs, dataFile)
	clearPages(t, fs, pageSize, pages[0], leaf)
	want := map[string]string{}
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		key := fmt.Sprintf("k%03d", i*5+1)
		want[key] = strings.Repeat(fmt.Sprint("large", i), repeats+i%7*repeats/3)
		mustPut(t, s, key, want[key])
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	files := mustRead(t, fs)
	copy(files[dataFile][int(leaf)*pageSize:], intact[int(leaf)*pageSize:int(leaf+1)*pageSize])
	ended := 0
	for _, id := range repairTreePages(t, files.files(t), pageSize) {
		o := modelOptions(files.files(t))
		flip(t, o.Storage.FS, int64(int(id)*pageSize+100))
		if endRepairTree(t, o, want) {
			ended++
			checkAfterRebuild(t, o, id, want, repeats > 3)
		}
	}
	if ended < 5 {
		t.Errorf("%d repair trees ended: this tests too little", ended)
	}
}

// endRepairTree writes into the skipped ranges until the root is rebuilt, and reports whether nothing is skipped any more.
func endRepairTree(t *testing.T, o mvcc.Options, want map[string]string) bool {
	t.Helper()
	var reports atomic.Int64
	o.Storage.OnRebuild = func(storage.Rebuild) { reports.Add(1) }
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for round := 0; round == 0 || reports.Load() == 0 && round < 200 && s.Stats().Storage.Damage.SkippedPages > 0; round++ {
		for key := range want {
			mustPut(t, s, key, want[key])
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	skipped := s.Stats().Storage.Damage.SkippedPages
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return skipped == 0
}

func checkAfterRebuild(t *testing.T, o mvcc.Options, id page.ID, want map[string]string, large bool) {
	t.Helper()
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s)
	for key, value := range want {
		if v, err := x.Get(nil, []byte(key), 0); err != nil || string(v.Data) != value {
			t.Errorf("page %d: %s has %d bytes, %v", id, key, len(v.Data), err)
		}
	}
	x.Close()
	report, err := s.Verify(context.Background(), inspect.VerifyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range report.Damages {
		if !large || d.Kind != inspect.DamageAccounts || !strings.Contains(d.Reason, "blob: the accounts are wrong") {
			t.Errorf("page %d: %+v", id, d)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

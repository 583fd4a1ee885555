package enginetest

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// repairTreePages lists the pages of the repair tree and then those of its mirror.
func repairTreePages(t testing.TB, fs vfs.FS) (ids []page.ID) {
	t.Helper()
	state, err := storage.Files{FS: fs, Dir: "db"}.OpenState()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = state.Close() }()
	root, mirror, err := state.RepairTreeRoots()
	if err != nil || root.Empty() || mirror.Empty() {
		t.Fatalf("%+v, %+v, %v", root, mirror, err)
	}
	for _, tree := range []btree.Root{root, mirror} {
		err := btree.Walk(state.Source(), tree, &btree.Visitor{Page: func(id page.ID, _ int, _ []byte) error {
			ids = append(ids, id)
			return nil
		}})
		if err != nil {
			t.Fatal(err)
		}
	}
	return ids
}

// TestAbandonedRepairTreeLosesNoValue damages one page of the repair tree or of its mirror after the other. A merge meets it and
// abandons that tree; then the root is rebuilt, and the repair tree gives its versions back. No value is lost, also over a
// restart, and the store is sound: no page and no large value stays allocated, because one flipped bit can be corrected. More
// damage leaves one trace, the large values that a leaf named (ADR 0018).
func TestAbandonedRepairTreeLosesNoValue(t *testing.T) {
	testseed.SkipUnderRace(t)
	t.Run("values in leaves", func(t *testing.T) { abandonEach(t, 3, 1) })
	t.Run("large values", func(t *testing.T) { abandonEach(t, 20, 1) })
	t.Run("values in leaves, more damage", func(t *testing.T) { abandonEach(t, 3, 20) })
	t.Run("large values, more damage", func(t *testing.T) { abandonEach(t, 20, 20) })
}

// abandonEach is the test with values of this length and more, and so many flipped bits.
func abandonEach(t *testing.T, repeats, bits int) {
	t.Helper()
	files, want := skippingStore(t, repeats)
	pageSize := modelOptions(nil).Storage.PageSize
	for _, id := range repairTreePages(t, files.files(t)) {
		o := modelOptions(files.files(t))
		for i := range bits {
			flip(t, o.Storage.FS, int64(int(id)*pageSize+100+i))
		}
		if endRepairTree(t, o, want) {
			checkAfterRebuild(t, o, id, want, repeats > 3 && bits > 1)
		} else if bits == 1 {
			t.Errorf("page %d: the repair tree did not end", id)
		}
	}
}

// TestTreeAbandonedAtTheStartIsFreedWithoutWrites: the root of the repair tree is damaged, so that the start finds the records of
// skipped pages in the mirror. Its pages are live, and nothing reaches them. They are freed although nothing is written, and then
// the root of the tree can be rebuilt.
func TestTreeAbandonedAtTheStartIsFreedWithoutWrites(t *testing.T) {
	files, want := skippingStore(t, 20)
	o := modelOptions(files.files(t))
	root := repairTreePages(t, o.Storage.FS)[0]
	flip(t, o.Storage.FS, int64(int(root)*o.Storage.PageSize+100))
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	if err := waitFor(func() bool { return s.Stats().Storage.Damage.SkippedPages == 0 }); err != nil {
		t.Error("the root of the tree was not rebuilt")
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	checkAfterRebuild(t, o, root, want, false)
}

// skippingStore has the files of a store whose tree has lost two pages, an inner node and a leaf, and the keys that were
// written to them since, with values of this length and more. The leaf can be read again, so that the next search can rebuild
// the node.
func skippingStore(t testing.TB, repeats int) (files image, want map[string]string) {
	t.Helper()
	var written []int
	for i := range 40 {
		written = append(written, i*5+1)
	}
	return skippingStoreOf(t, written, repeats)
}

// skippingStoreOf is skippingStore with these keys written.
func skippingStoreOf(t testing.TB, written []int, repeats int) (files image, want map[string]string) {
	t.Helper()
	o := modelOptions(vfs.NewMem())
	fs, pageSize := o.Storage.FS, o.Storage.PageSize
	writeWithLarge(t, o, "small, too")
	pages := treePages(t, fs)
	leaf, intact := pages[len(pages)/2], readFile(t, fs, dataFile)
	clearPages(t, fs, pageSize, pages[0], leaf)
	want = map[string]string{}
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for i, number := range written {
		key := fmt.Sprintf("k%03d", number)
		want[key] = strings.Repeat(fmt.Sprint("large", i), repeats+i%7*repeats/3)
		mustPut(t, s, key, want[key])
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	files = mustRead(t, fs)
	copy(files[dataFile][int(leaf)*pageSize:], intact[int(leaf)*pageSize:int(leaf+1)*pageSize])
	return files, want
}

// endRepairTree writes into the skipped ranges until the root is rebuilt, and reports whether nothing is skipped any more.
func endRepairTree(t *testing.T, o mvcc.Options, want map[string]string) bool {
	t.Helper()
	var final atomic.Bool
	o.Storage.OnRebuild = func(r storage.Rebuild) {
		if strings.Contains(r.Reason, "the allocation map may have pages") {
			final.Store(true)
		}
	}
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	for round := 0; round == 0 || !final.Load() && round < 200 && s.Stats().Storage.Damage.SkippedPages > 0; round++ {
		for key := range want {
			mustPut(t, s, key, want[key])
		}
		if err := s.Checkpoint(context.Background()); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // for the search
	}
	skipped := s.Stats().Storage.Damage.SkippedPages
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	return skipped == 0
}

func checkAfterRebuild(t *testing.T, o mvcc.Options, id page.ID, want map[string]string, leaks bool) {
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
		if !leaks || d.Kind != inspect.DamageAccounts || !strings.Contains(d.Reason, "blob: the accounts are wrong") {
			t.Errorf("page %d: %+v", id, d)
		}
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

package mvcc

import (
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestUnchangedSinceSeesWhatCameAndWent: a key that was put and deleted again since an epoch that
// is readable has changed, also when versions were pruned and checkpoints have dropped what no
// reader sees.
func TestUnchangedSinceSeesWhatCameAndWent(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	mustPut(t, s, "a", "v")
	since := mustPut(t, s, "c", "v")
	holder := mustSession(t, s)
	defer holder.Close()
	if _, err := holder.OpenSnapshot(since); err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s)
	defer x.Close()
	check := func(when, lower, upper string, want bool) {
		t.Helper()
		tx, err := x.Begin(TxnOptions{})
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if got, err := tx.UnchangedSince([]byte(lower), []byte(upper), since); err != nil || got != want {
			t.Errorf("%s: [%s, %s) unchanged: %v, %v", when, lower, upper, got, err)
		}
	}
	check("at once", "a", "d", true)
	put := func() {
		var w Write
		w.Set([]byte("b"), []byte("v"))
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
		w.Reset()
		w.Delete([]byte("b"))
		if _, err := commitAndWait(x, &w); err != nil {
			t.Fatal(err)
		}
	}
	put()
	check("in memory", "a", "d", false)
	for range 3 {
		s.collector.collect(nil, true)
		check("pruned", "a", "d", false)
		if err := s.Checkpoint(t.Context()); err != nil {
			t.Fatal(err)
		}
		check("merged", "a", "d", false)
		check("merged", "a", "b", true)
		check("merged", "c", "d", true)
		mustPut(t, s, "other", "v") // something to merge
	}
	holder.CloseSnapshot()
}

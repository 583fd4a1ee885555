package restore

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// TestARestoredStoreUsesNoEpochOfTheOriginal: the original had an unclean end after the restored state, and skipped epochs as every start
// after one does. An epoch that a client knows of the original's future names no commit of the restored store, and no state of it.
func TestARestoredStoreUsesNoEpochOfTheOriginal(t *testing.T) {
	b := newBench(t)
	b.commits(5)
	b.archived()
	at := b.arch.Status().Archived
	image := filepath.Join(t.TempDir(), "image")
	check(t, os.CopyFS(image, os.DirFS(b.dir))) // as a crash leaves it
	b.close()
	b.dir = image
	b.open()
	b.commits(5)
	b.archived()
	future := b.store.Visible()
	dir := filepath.Join(t.TempDir(), "db")
	r, err := Run(t.Context(), Options{Store: b.target, Dir: dir, PageSize: 1024, Memory: 64 << 20, Target: archive.Target{Epoch: at}})
	check(t, err)
	b.close()
	if r.Reached.Epoch != at || future < at+1<<24 {
		t.Fatalf("restored to epoch %d, want %d; the original is at %d", r.Reached.Epoch, at, future)
	}
	o := b.options(dir)
	o.Retention = time.Hour
	s, err := mvcc.Open(o)
	check(t, err)
	defer func() { check(t, s.Close()) }()
	x := s.OwnSession()
	defer x.Close()
	w := new(mvcc.Write)
	w.Set([]byte("key"), []byte("value"))
	e, err := x.Commit(t.Context(), w)
	check(t, err)
	if e <= future {
		t.Errorf("the restored store commits at epoch %d, and the original was at %d", e, future)
	}
	if _, err := x.OpenSnapshot(future); !errors.As(err, new(*mvcc.SnapshotGoneError)) {
		t.Errorf("epoch %d of the original is read: %v", future, err)
	}
}

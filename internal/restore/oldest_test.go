package restore

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage"
)

// TestABackupFromBeforeFinalizeIsRestored: a store of the oldest feature level has no lineage. What is restored has its level, so that a version that
// knows no other one can open it, and an identity of its own.
func TestABackupFromBeforeFinalizeIsRestored(t *testing.T) {
	target, err := objectstore.Open(t.TempDir(), objectstore.Options{})
	check(t, err)
	at := func(dir string, level keys.FeatureLevel) *mvcc.Store {
		t.Helper()
		s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: dir, PageSize: 1024, MemoryBytes: 64 << 20, FeatureLevel: level}})
		check(t, err)
		return s
	}
	put := func(s *mvcc.Store, key string) {
		t.Helper()
		x, err := s.Session()
		check(t, err)
		defer x.Close()
		var w mvcc.Write
		w.Set([]byte(key), []byte("value"))
		epoch, err := x.Commit(t.Context(), &w)
		check(t, err)
		check(t, s.Wait(t.Context(), epoch, mvcc.DurabilitySync))
	}
	original := at(filepath.Join(t.TempDir(), "db"), keys.FeatureLevelOldest)
	for i := range 100 {
		put(original, fmt.Sprintf("key %03d", i))
	}
	m, err := backup.Create(t.Context(), original, target, backup.Options{})
	check(t, err)
	want, id := contents(t, original), original.ID()
	check(t, original.Close())

	leased := false
	o := Options{Store: target, PageSize: 1024, Memory: 64 << 20, Progress: func(p Progress) {
		leased = leased || p.Step == "base" && isLeased(t, target, backup.Dir(keys.Lineage{}, id))
	}}
	for _, o.Oldest = range []string{"", backup.Dir(keys.Lineage{}, id)} {
		o.Dir = filepath.Join(t.TempDir(), "restored")
		leased = false
		r, err := Run(t.Context(), o)
		check(t, err)
		if !leased {
			t.Error("nothing keeps a prune from deleting the backup while it is restored")
		}
		s := at(o.Dir, 0)
		if r.Base.ID != m.ID || r.Reached.Epoch != m.Epoch() || contents(t, s) != want {
			t.Fatalf("another state was restored: %+v", r)
		}
		if s.FeatureLevel() != keys.FeatureLevelOldest || s.ID() == id || s.ID() != r.StoreID {
			t.Fatalf("feature level %d, store %x from %x", s.FeatureLevel(), s.ID(), id)
		}
		put(s, "after")
		check(t, s.Close())
		s = at(o.Dir, 0)
		if contents(t, s) == want {
			t.Fatal("a commit after the restore is lost")
		}
		check(t, s.Close())
	}
	o.Dir, o.Oldest, o.Target = filepath.Join(t.TempDir(), "restored"), "", archive.Target{Epoch: m.Epoch() + 1}
	if _, err := Run(t.Context(), o); !Unreachable(err) {
		t.Fatalf("a state after the backup: %v", err)
	}
}

// isLeased reports whether a restore keeps what the directory of a history has.
func isLeased(t *testing.T, target objectstore.Store, dir string) (found bool) {
	check(t, target.List(t.Context(), dir+"/restores/", func(objectstore.Object) error {
		found = true
		return nil
	}))
	return found
}

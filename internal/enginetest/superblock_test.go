package enginetest

import (
	"context"
	"maps"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestBulkLoadSurvivesADamagedSuperblock: a bulk load is in the tree and not in the log, so that no
// replay can restore it.
func TestBulkLoadSurvivesADamagedSuperblock(t *testing.T) {
	o := modelOptions(vfs.NewMem())
	s, err := mvcc.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, "a", "1")
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Add([]byte("b"), []byte("2")); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Commit(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	want := dump(t, s)
	files := mustRead(t, o.Storage.FS)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for slot := range 2 {
		damaged := maps.Clone(files)
		damaged[dataFile] = slices.Clone(files[dataFile])
		damaged[dataFile][slot*o.Storage.PageSize+20] ^= 1
		o.Storage.FS = damaged.files(t)
		s, err := mvcc.Open(o)
		if err != nil {
			t.Logf("superblock %d damaged: %v", slot, err)
			continue // refused
		}
		if err := equalMaps(want, dump(t, s)); err != nil {
			t.Errorf("superblock %d damaged: opened without an error, but %v", slot, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

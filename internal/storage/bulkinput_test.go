package storage

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/extsort"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestDamagedTemporaryFileEndsTheBulkLoad: the merge gets the error of the run, and no entry after it.
func TestDamagedTemporaryFileEndsTheBulkLoad(t *testing.T) {
	fs := vfs.NewMem()
	s := extsort.New(extsort.Options{FS: fs, FileName: func(int) string { return "run" }, ChunkBytes: 4096, InlineMax: 128})
	for i := range 500 {
		if err := s.Add(fmt.Appendf(nil, "%06d", i), []byte("value")); err != nil {
			t.Fatal(err)
		}
	}
	r, err := s.Finish(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	f, err := fs.Open("run", vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte{0xff}, 3000); err != nil {
		t.Fatal(err)
	}
	in, n := newBulkInput(r, 1, newMemInput(nil)), 0
	for e := (btree.Entry{}); in.Next(&e); {
		n++
	}
	if !errors.Is(in.Err(), extsort.ErrDamaged) || n == 500 {
		t.Fatalf("%d entries and %v", n, in.Err())
	}
}

package enginetest

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// damageLeaves changes a byte in the middle of every leaf, or of every page of packed or bulk values.
func damageLeaves(t testing.TB, fs vfs.FS, pageSize int, types ...byte) {
	t.Helper()
	file := readFile(t, fs, dataFile)
	f, err := fs.Open(dataFile, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	for at := 2 * pageSize; at < len(file); at += pageSize {
		if bytes.IndexByte(types, file[at+4]) >= 0 {
			if _, err := f.WriteAt([]byte{file[at+pageSize/2] ^ 1}, int64(at+pageSize/2)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestDamagedLargeValueNamesItsKey in a read and in a scan.
func TestDamagedLargeValueNamesItsKey(t *testing.T) {
	fs := vfs.NewMem()
	s, err := mvcc.Open(tiny(fs)) // not mustOpen, which would verify in the end
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, "large", strings.Repeat("v", 50_000))
	mustPut(t, s, "small", "v")
	mustClose(t, s)
	damageLeaves(t, fs, 8192, 5, 6)
	s, err = mvcc.Open(tiny(fs))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	x := mustSession(t, s)
	defer x.Close()
	var damage *storage.CorruptionError
	if _, err := x.Get(nil, []byte("large"), 0); !errors.As(err, &damage) || string(damage.KeyLower) != "large" || string(damage.KeyUpper) != "large\x00" {
		t.Errorf("get: %v, keys %q to %q", err, damage.KeyLower, damage.KeyUpper)
	}
	if got := get(t, s, "small", 0); got != "v" {
		t.Errorf("small is %q", got)
	}
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	c, err := x.Scan(mvcc.ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Next() || !errors.As(c.Err(), &damage) || string(damage.KeyLower) != "large" {
		t.Errorf("scan: %v", c.Err())
	}
}

// TestDamagedPageIsNamedByABatchGet: the error tells which keys the page hides, and a batch without them is answered.
func TestDamagedPageIsNamedByABatchGet(t *testing.T) {
	fs := vfs.NewMem()
	s, err := mvcc.Open(tiny(fs)) // not mustOpen, which would verify in the end
	if err != nil {
		t.Fatal(err)
	}
	x := mustSession(t, s)
	putMany(t, x, 2000, func(w *mvcc.Write, key []byte) { w.Set(key, bytes.Repeat([]byte("v"), 100)) })
	x.Close()
	mustClose(t, s)
	file := readFile(t, fs, dataFile)
	f, err := fs.Open(dataFile, vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(file, []byte("1000")) // a suffix in one leaf
	if _, err := f.WriteAt([]byte{file[at] ^ 1}, int64(at)); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = mvcc.Open(tiny(fs)); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	x = mustSession(t, s)
	defer x.Close()
	if _, err := x.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	var list, sound [][]byte
	for i := range 2000 {
		list = append(list, fmt.Appendf(nil, "key-%07d", i))
	}
	nothing := func(int, mvcc.Value) error { return nil }
	var damage *storage.CorruptionError
	if err := x.ReadAll(t.Context(), list, nothing); !errors.As(err, &damage) || damage.KeyLower == nil || damage.KeyUpper == nil {
		t.Fatalf("%v: %+v", err, damage)
	}
	for _, key := range list {
		if bytes.Compare(key, damage.KeyLower) < 0 || bytes.Compare(key, damage.KeyUpper) >= 0 {
			sound = append(sound, key)
		}
	}
	if n := len(list) - len(sound); n == 0 || n > 200 {
		t.Errorf("%d keys between %q and %q", n, damage.KeyLower, damage.KeyUpper)
	}
	if err := x.ReadAll(t.Context(), sound, nothing); err != nil {
		t.Errorf("the others: %v", err)
	}
}

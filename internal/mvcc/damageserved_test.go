package mvcc

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"epochkv/internal/storage"
	"epochkv/internal/vfs"
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
	s, err := Open(tiny(fs)) // not mustOpen, which would verify in the end
	if err != nil {
		t.Fatal(err)
	}
	mustPut(t, s, "large", strings.Repeat("v", 50_000))
	mustPut(t, s, "small", "v")
	mustClose(t, s)
	damageLeaves(t, fs, 8192, 5, 6)
	s, err = Open(tiny(fs))
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
	if _, err := x.View(0); err != nil {
		t.Fatal(err)
	}
	c, err := x.Scan(ScanOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Next() || !errors.As(c.Err(), &damage) || string(damage.KeyLower) != "large" {
		t.Errorf("scan: %v", c.Err())
	}
}

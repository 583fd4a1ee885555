package vfs

import "testing"

// unsynced counts what is written to a file between two syncs.
type unsynced struct {
	File
	now, most, total int
}

func (f *unsynced) WriteAt(p []byte, off int64) (int, error) {
	n, err := f.File.WriteAt(p, off)
	f.now += n
	f.total += n
	f.most = max(f.most, f.now)
	return n, err
}

func (f *unsynced) Sync() error     { f.now = 0; return f.File.Sync() }
func (f *unsynced) SyncData() error { f.now = 0; return f.File.SyncData() }

// TestZeroedFilesAreSyncedInPieces: every other sync of the device waits for what was written to such a file.
func TestZeroedFilesAreSyncedInPieces(t *testing.T) {
	file, err := NewMem().Open("f", Create)
	if err != nil {
		t.Fatal(err)
	}
	f := &unsynced{File: file}
	const size = 10<<20 + 4096
	if err := PreallocateZeroed(f, size, nil); err != nil {
		t.Fatal(err)
	}
	if f.most > 1<<20 || f.total != size || f.now != 0 {
		t.Errorf("%d bytes written of %d, at most %d between two syncs, %d after the last", f.total, size, f.most, f.now)
	}
}

package vfs

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestAFullBtrfsTakesWhatAFileHasBlocksFor: a log writes its last page again and again. The test mounts a file system, as only root can where the
// program for it exists.
func TestAFullBtrfsTakesWhatAFileHasBlocksFor(t *testing.T) {
	if _, err := exec.LookPath("mkfs.btrfs"); err != nil || os.Geteuid() != 0 {
		t.Skip("no Btrfs can be made here")
	}
	image, dir := filepath.Join(t.TempDir(), "image"), t.TempDir()
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 128<<20)); err != nil {
		t.Fatal(err)
	}
	if err := exec.CommandContext(t.Context(), "mkfs.btrfs", "-q", image).Run(); err != nil {
		t.Skip(err)
	}
	if err := exec.CommandContext(t.Context(), "mount", "-o", "loop", image, dir).Run(); err != nil {
		t.Skip(err)
	}
	defer func() {
		if err := exec.Command("umount", dir).Run(); err != nil { //nolint:noctx // also after the end of the test's context
			t.Error(err)
		}
	}()
	const size = 4 << 20
	fs := NewOS()
	f, err := fs.Open(filepath.Join(dir, "log"), Create)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if err := PreallocateZeroed(f, size, nil); err != nil {
		t.Fatal(err)
	}
	other, err := fs.Open(filepath.Join(dir, "other"), Create)
	if err != nil {
		t.Fatal(err)
	}
	page, full := AlignedBuffer(1<<20), error(nil)
	for at := int64(0); full == nil; at += int64(len(page)) {
		if _, full = other.WriteAt(page, at); full == nil {
			full = other.SyncData()
		}
	}
	if err := other.Close(); err != nil || !errors.Is(full, ErrNoSpace) {
		t.Fatal(full, err)
	}
	for at := int64(0); at < size; at += size / 64 {
		for range 3 {
			if _, err := f.WriteAt(page[:4096], at); err != nil {
				t.Fatalf("a write at %d, where the file has blocks: %v", at, err)
			}
			if err := f.SyncData(); err != nil {
				t.Fatalf("a sync after a write at %d: %v", at, err)
			}
		}
	}
}

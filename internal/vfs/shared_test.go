package vfs

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

// TestACopyMayShareBlocks: programs that copy files share their blocks where the file system can. The test mounts one, as only root can where the
// program for it exists.
func TestACopyMayShareBlocks(t *testing.T) {
	if _, err := exec.LookPath("mkfs.xfs"); err != nil || os.Geteuid() != 0 {
		t.Skip("no XFS can be made here")
	}
	image, dir := filepath.Join(t.TempDir(), "image"), t.TempDir()
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 320<<20)); err != nil {
		t.Fatal(err)
	}
	if err := exec.CommandContext(t.Context(), "mkfs.xfs", "-q", image).Run(); err != nil {
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
	fs, name := NewOS(), filepath.Join(dir, "log")
	f, err := fs.Open(name, Create)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for i := range int64(100) { // extents of which the last is beyond those that are read at a time
		if _, err := f.WriteAt(AlignedBuffer(4096), 8192*i); err != nil {
			t.Fatal(err)
		}
	}
	if err := f.Sync(); err != nil || SharesBlocks(f) {
		t.Fatalf("a file without a copy: %v, or it shares blocks", err)
	}
	last, err := os.OpenFile(name+"-copy", os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = last.Close() }()
	one := unix.FileCloneRange{Src_fd: int64(f.(*osFile).fd), Src_offset: 8192 * 99, Src_length: 4096}
	if err := unix.IoctlFileCloneRange(int(last.Fd()), &one); err != nil {
		t.Skip(err)
	}
	if !SharesBlocks(f) {
		t.Error("the last block of a file with a copy is not known to be shared")
	}
}

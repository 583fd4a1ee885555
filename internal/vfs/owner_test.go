package vfs

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// TestWhatRootCreatesBelongsToTheOwnerOfItsDirectory: files, directories and locks; and nothing changes its owner that was there before.
func TestWhatRootCreatesBelongsToTheOwnerOfItsDirectory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root creates files for others")
	}
	const account = 61234
	ownerOf := func(name string) uint32 {
		t.Helper()
		info, err := os.Lstat(name)
		if err != nil {
			t.Fatal(err)
		}
		return info.Sys().(*syscall.Stat_t).Uid
	}
	fsys, dir := NewOS(), t.TempDir()
	other := filepath.Join(t.TempDir(), "of another account")
	mustClose(t, mustCreate(t, fsys, other, "abc"))
	if err := os.Symlink(other, filepath.Join(dir, "LINK")); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(dir, account, account); err != nil {
		t.Fatal(err)
	}
	if err := fsys.MkdirAll(filepath.Join(dir, "a", "b")); err != nil {
		t.Fatal(err)
	}
	mustClose(t, mustCreate(t, fsys, filepath.Join(dir, "a", "b", "f"), "abc"))
	for _, name := range []string{"LOCK", "LINK"} {
		lock, err := fsys.Lock(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := lock.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"a", "a/b", "a/b/f", "LOCK"} {
		if uid := ownerOf(filepath.Join(dir, name)); uid != account {
			t.Errorf("%s belongs to %d", name, uid)
		}
	}
	if uid := ownerOf(other); uid != 0 {
		t.Errorf("a file that a link leads to has changed its owner to %d", uid)
	}
}

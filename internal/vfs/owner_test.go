package vfs

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
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

// TestLockOnAFileSystemThatCanOnlyBeRead: what only reads a store, as salvage does, locks the file that is there, or without one the
// directory. A second attempt finds it locked.
func TestLockOnAFileSystemThatCanOnlyBeRead(t *testing.T) {
	readOnly := func(name string, flags int) (int, error) {
		_, err := os.Lstat(name)
		switch exists := err == nil; {
		case flags&unix.O_EXCL != 0 && exists:
			return -1, unix.EEXIST
		case flags&(unix.O_RDWR|unix.O_CREAT) != 0:
			return -1, unix.EROFS
		}
		return openRetry(name, flags)
	}
	for _, exists := range []bool{true, false} {
		dir := t.TempDir()
		name, locked := filepath.Join(dir, "LOCK"), dir
		if exists {
			mustClose(t, mustCreate(t, NewOS(), name, "123"))
			locked = name
		}
		fd, err := createLock(name, readOnly)
		if err != nil {
			t.Fatalf("the lock file exists: %v: %v", exists, err)
		}
		if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
			t.Fatal(err)
		}
		other, err := openRetry(locked, unix.O_RDONLY|unix.O_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Flock(other, unix.LOCK_EX|unix.LOCK_NB); err != unix.EWOULDBLOCK {
			t.Errorf("the lock file exists: %v: it is not locked: %v", exists, err)
		}
		if err := unix.Close(fd); err != nil {
			t.Error(err)
		}
		if err := unix.Close(other); err != nil {
			t.Error(err)
		}
	}
}

package vfs

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestOnlyTheOwnerMayReadFilesAndDirectories(t *testing.T) {
	old := syscall.Umask(0) // the result must not depend on the umask of the account
	defer syscall.Umask(old)
	fsys := NewOS()
	dir := filepath.Join(t.TempDir(), "a", "b")
	if err := fsys.MkdirAll(dir); err != nil {
		t.Fatal(err)
	}
	mustClose(t, mustCreate(t, fsys, filepath.Join(dir, "f"), "abc"))
	lock, err := fsys.Lock(filepath.Join(dir, "LOCK"))
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]os.FileMode{"../../a": 0o700, ".": 0o700, "f": 0o600, "LOCK": 0o600} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v; want %v", name, info.Mode().Perm(), err, want)
		}
	}
}

func TestLockedErrorNamesTheProcess(t *testing.T) {
	fsys := NewOS()
	name := filepath.Join(t.TempDir(), "LOCK")
	if err := os.WriteFile(name, []byte("a longer text than any process id has, of an earlier holder"), 0o600); err != nil {
		t.Fatal(err)
	}
	lock, err := fsys.Lock(name)
	if err != nil {
		t.Fatal(err)
	}
	_, err = fsys.Lock(name)
	var locked *LockedError
	if !errors.Is(err, ErrLocked) || !errors.As(err, &locked) || locked.PID != os.Getpid() {
		t.Errorf("second lock: %v", err)
	}
	if err := os.Truncate(name, 0); err != nil { // as a full disk leaves it
		t.Fatal(err)
	}
	if _, err = fsys.Lock(name); !errors.Is(err, ErrLocked) || !errors.As(err, &locked) || locked.PID != 0 {
		t.Errorf("lock without the id of a process: %v", err)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}
}

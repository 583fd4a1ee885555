package objectstore

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"
)

// TestAPipeIsNoObject: a pipe with the name of an object does not block what reads it.
func TestAPipeIsNoObject(t *testing.T) {
	dir := t.TempDir()
	check(t, syscall.Mkfifo(filepath.Join(dir, "object"), 0o600))
	s, err := Open(dir, Options{})
	check(t, err)
	read := make(chan error, 1)
	go func() {
		_, err := s.Read(t.Context(), "object", 0, -1)
		read <- err
	}()
	select {
	case err := <-read:
		if !errors.Is(err, errNotAFile) {
			t.Fatal(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the read of a pipe does not return")
	}
}

// TestOtherFilesBesideObjectsAreNoObstacle: a file system has lost+found in its root, which root alone may read.
func TestOtherFilesBesideObjectsAreNoObstacle(t *testing.T) {
	dir := t.TempDir()
	check(t, os.Chmod(dir, 0o755))
	s, err := Open(dir, Options{})
	check(t, err)
	check(t, s.Create(t.Context(), "a/object", Bytes("x")))
	check(t, os.Mkdir(filepath.Join(dir, "lost+found"), 0))
	check(t, os.WriteFile(filepath.Join(dir, "lost+found", "x"), nil, 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "not an object"), nil, 0o600))
	if all := names(t, s, ""); !slices.Equal(all, []string{"a/object:1"}) {
		t.Fatalf("listed %v", all)
	}
}

// TestWhatRootCreatesBelongsToTheAccountOfTheDirectory: a prune or a restore by root must leave nothing that the server cannot read.
func TestWhatRootCreatesBelongsToTheAccountOfTheDirectory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root creates files for others")
	}
	const account = 61234
	dir := t.TempDir()
	check(t, os.Chown(dir, account, account))
	s, err := Open(dir, Options{})
	check(t, err)
	check(t, s.Create(t.Context(), "a/b/object", Bytes("x")))
	check(t, filepath.WalkDir(dir, func(name string, _ os.DirEntry, err error) error {
		check(t, err)
		info, err := os.Lstat(name)
		check(t, err)
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != account {
			t.Errorf("%s belongs to %d", name, uid)
		}
		return nil
	}))
}

// TestEmptyDirectoriesMayBeDeletedAtAnyTime: another process may have deleted the last object of a directory.
func TestEmptyDirectoriesMayBeDeletedAtAnyTime(t *testing.T) {
	dir := t.TempDir()
	s, err := Open(dir, Options{})
	check(t, err)
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-done:
				return
			case <-time.After(rand.N(20 * time.Millisecond)): // at times longer than the syncs of new directories on a busy machine
				_ = os.Remove(filepath.Join(dir, "a", "b"))
				_ = os.Remove(filepath.Join(dir, "a"))
			}
		}
	}()
	for range 100 {
		if err = s.Create(t.Context(), "a/b/object", Bytes("x")); err == nil {
			err = s.Delete(t.Context(), "a/b/object")
		}
		if err != nil {
			break
		}
	}
	close(done)
	<-ended
	check(t, err)
}

// TestABlockThatCannotBeReadIsTold: it is of one object, and a network may say so for a while.
func TestABlockThatCannotBeReadIsTold(t *testing.T) {
	for errno, want := range map[syscall.Errno]bool{syscall.EIO: true, syscall.EBADMSG: true, syscall.EUCLEAN: true, syscall.ESTALE: false, syscall.EACCES: false} {
		if err := fileError(opRead, "x", errno); errors.Is(err, ErrUnreadable) != want || want && !isTemporary(err) {
			t.Errorf("%v: %v", errno, err)
		}
		if err := fileError("create", "x", errno); errors.Is(err, ErrUnreadable) {
			t.Errorf("%v of a creation: %v", errno, err)
		}
	}
}

// damagedEntry is an entry of a directory about which the file system tells something after a few errors.
type damagedEntry struct {
	fs.DirEntry
	errno  syscall.Errno
	errors int
}

func (d *damagedEntry) Info() (fs.FileInfo, error) {
	if d.errors == 0 {
		return d.DirEntry.Info()
	}
	d.errors--
	return nil, &fs.PathError{Op: "lstat", Err: d.errno}
}

// TestAnInodeThatCannotBeReadEndsNoList: its object is listed, with an age that nothing takes for old.
func TestAnInodeThatCannotBeReadEndsNoList(t *testing.T) {
	dir := t.TempDir()
	check(t, os.WriteFile(filepath.Join(dir, "object"), []byte("x"), 0o600))
	entries, err := os.ReadDir(dir)
	check(t, err)
	for _, c := range []struct {
		errno  syscall.Errno
		errors int
		before int // unreadable objects in the list
		want   string
	}{
		{syscall.EIO, 1, 0, "known"},
		{syscall.EIO, 1, unreadableMax, "known"}, // that of a network
		{syscall.EIO, 100, 0, "unknown"},
		{syscall.EBADMSG, 100, unreadableMax - 1, "unknown"},
		{syscall.EUCLEAN, 100, 0, "unknown"},
		{syscall.EIO, 100, unreadableMax, "error"},
		{syscall.EACCES, 100, 0, "error"},
		{syscall.ENOENT, 100, 0, "nothing"},
	} {
		got := "nothing"
		l := directoryList{directory: &directory{dir}, unreadable: c.before, each: func(o Object) error {
			switch {
			case o == Object{Name: "object"} && o.YoungerThan(0, time.Now().Add(time.Hour)):
				got = "unknown"
			case o.Name == "object" && o.Size == 1 && time.Since(o.Created) < time.Hour:
				got = "known"
			}
			return nil
		}}
		if err := l.file(t.Context(), "object", &damagedEntry{entries[0], c.errno, c.errors}); err != nil {
			got = "error"
		}
		if got != c.want {
			t.Errorf("%v, %d times, after %d such objects: %s, want %s", c.errno, c.errors, c.before, got, c.want)
		}
	}
}

// givenUp is content whose creation is given up when its end is read.
type givenUp struct{ context.CancelFunc }

func (g *givenUp) Open() (io.ReadCloser, error) { return io.NopCloser(g), nil }
func (g *givenUp) Size() int64                  { return 0 }

func (g *givenUp) Read([]byte) (int, error) {
	g.CancelFunc()
	return 0, io.EOF
}

// TestACreationThatWasGivenUpCreatesNothing: a file that is complete gets no name after the context has ended.
func TestACreationThatWasGivenUpCreatesNothing(t *testing.T) {
	s, err := Open(t.TempDir(), Options{})
	check(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	if err := s.Create(ctx, "object", &givenUp{cancel}); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	if _, err := s.Read(t.Context(), "object", 0, -1); !errors.Is(err, ErrNotFound) {
		t.Fatal(err)
	}
}

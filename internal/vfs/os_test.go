package vfs

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestErrorsNameTheFileAndMatchTheirMeaning(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG} {
		err := pathError(OpWrite, "a/b", errno)
		if !errors.Is(err, ErrNoSpace) || !errors.Is(err, errno) {
			t.Errorf("%v matches neither ErrNoSpace nor itself", err)
		}
	}
	for _, errno := range []syscall.Errno{syscall.EIO, syscall.ENODATA, syscall.EREMOTEIO, syscall.EILSEQ} {
		err := pathError(OpRead, "a/b", errno)
		if !errors.Is(err, ErrDevice) || !errors.Is(err, errno) {
			t.Errorf("%v of a read matches neither ErrDevice nor itself", err)
		}
	}
	if err := pathError(OpOpen, "a/b", syscall.EILSEQ); errors.Is(err, ErrDevice) {
		t.Errorf("%v of an open matches ErrDevice", err)
	}
	_, err := NewOS().Open(filepath.Join(t.TempDir(), "absent"), ReadOnly)
	var named *fs.PathError
	if !errors.As(err, &named) || filepath.Base(named.Path) != "absent" || !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Open of an absent file: %v", err)
	}
}

func TestDirectReadOverAnUnalignedEndIsEOF(t *testing.T) {
	direct := NewOS().Direct()
	f, err := direct.Open(filepath.Join(t.TempDir(), "f"), Create)
	if errors.Is(err, syscall.EINVAL) {
		t.Skip("no direct I/O here")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := AlignedBuffer(2 * DirectAlignment)
	for i := range want {
		want[i] = byte(i / 7)
	}
	if _, err := f.WriteAt(want, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(DirectAlignment + 100); err != nil {
		t.Fatal(err)
	}
	got := AlignedBuffer(4 * DirectAlignment)
	n, err := f.ReadAt(got, 0)
	if n != DirectAlignment+100 || err != io.EOF || !bytes.Equal(got[:n], want[:n]) {
		t.Fatalf("read over an unaligned end: %d bytes, %v", n, err)
	}
}

func TestCloseWaitsForOperationsInFlight(t *testing.T) {
	f := mustCreate(t, NewOS(), filepath.Join(t.TempDir(), "f"), "x").(*osFile)
	if !f.enter() {
		t.Fatal("an open file is closed")
	}
	closed := make(chan error)
	go func() { closed <- f.Close() }()
	for f.users.Load()&closedBit == 0 {
		runtime.Gosched()
	}
	select {
	case err := <-closed:
		t.Fatal("closed under an operation: ", err)
	case <-time.After(20 * time.Millisecond):
	}
	if f.enter() {
		t.Error("an operation began after Close")
	}
	f.leave()
	if err := <-closed; err != nil {
		t.Error(err)
	}
}

// A reader that loses the race with Close gets an error, never another file's bytes.
func TestReadsRacingCloseNeverTouchAnotherFile(t *testing.T) {
	dir, o := t.TempDir(), NewOS()
	for round := range 200 {
		f, err := o.Open(filepath.Join(dir, "mine"), Create)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte("mine"), 0); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				buf := make([]byte, 4)
				for {
					if _, err := f.ReadAt(buf, 0); err != nil {
						if !errors.Is(err, fs.ErrClosed) {
							t.Errorf("round %d: %v", round, err)
						}
						return
					}
					if string(buf) != "mine" {
						t.Errorf("round %d: read %q", round, buf)
						return
					}
				}
			})
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		other, err := o.Open(filepath.Join(dir, "other"), Create)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := other.WriteAt([]byte("them"), 0); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if err := errors.Join(other.Close(), o.Remove(filepath.Join(dir, "other")), o.Remove(filepath.Join(dir, "mine"))); err != nil {
			t.Fatal(err)
		}
	}
}

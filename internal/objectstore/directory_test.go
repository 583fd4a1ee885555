package objectstore

import (
	"errors"
	"path/filepath"
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

package objectstore

import (
	"context"
	"errors"
	"io"
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

package mvcc

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// A permission that ends between the check under the latches and the epoch permits nothing: otherwise a write could get an epoch
// after the answer to what has ended its permission.
func TestPermissionThatEndsBeforeTheEpochPermitsNothing(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	ended := errors.New("ended")
	for name, commit := range map[string]func(x *Session) error{
		"write": func(x *Session) error {
			var w Write
			w.Set([]byte("k"), []byte("v"))
			_, err := x.Commit(context.Background(), &w)
			return err
		},
		"transaction": func(x *Session) error {
			txn, err := x.Begin(TxnOptions{})
			if err != nil {
				return err
			}
			if err := txn.Set([]byte("k"), []byte("v")); err != nil {
				return err
			}
			_, err = txn.Commit(context.Background())
			return err
		},
	} {
		x := mustSession(t, s)
		calls := 0
		x.Permit(func() error {
			if calls++; calls > 1 {
				return ended
			}
			return nil
		})
		before := s.Visible()
		if err := commit(x); !errors.As(err, new(*NotPermittedError)) || !errors.Is(err, ended) || calls != 2 {
			t.Errorf("%s: got %v after %d calls", name, err, calls)
		}
		if s.Visible() == before {
			t.Errorf("%s: no epoch was used, so this tests nothing", name)
		}
		x.Permit(nil)
		if all := dump(t, s); len(all) != 0 {
			t.Errorf("%s: the store has %v", name, all)
		}
	}
}

// A commit that fails after its permission has ended shows nothing of what has made it fail: the key and the epoch of a conflict are those of others.
func TestACommitThatFailsAsksForItsPermission(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	x, other := mustSession(t, s), mustSession(t, s)
	ended := errors.New("ended")
	for _, permitted := range []error{nil, ended} {
		txn, err := x.Begin(TxnOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if err := txn.Set([]byte("k"), []byte("v")); err != nil {
			t.Fatal(err)
		}
		var w Write
		w.Set([]byte("k"), []byte("w"))
		if _, err := other.Commit(context.Background(), &w); err != nil {
			t.Fatal(err)
		}
		calls := 0
		x.Permit(func() error {
			if calls++; calls > 1 {
				return permitted
			}
			return nil
		})
		_, err = txn.Commit(context.Background())
		if conflict := errors.As(err, new(*ConflictError)); conflict != (permitted == nil) || !errors.Is(err, permitted) && permitted != nil || calls != 2 {
			t.Errorf("%v: got %v after %d calls", permitted, err, calls)
		}
	}
}

// A bulk load is asked once, at the beginning of its commit pause: what has ended the permission waits for the end of the pause.
func TestTheEndOfAPermissionWaitsForTheCommitPause(t *testing.T) {
	s := mustOpen(t, tiny(vfs.NewMem()))
	if err := s.AwaitCommitPause(context.Background()); err != nil {
		t.Fatal(err)
	}
	l, err := s.BeginBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Add([]byte("k"), []byte("v")); err != nil {
		t.Fatal(err)
	}
	permitted, proceed, committed := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	l.Permit(func() error {
		close(permitted)
		<-proceed
		return nil
	})
	go func() {
		_, err := l.Commit(context.Background())
		committed <- err
	}()
	<-permitted
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := s.AwaitCommitPause(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("in the pause: %v", err)
	}
	close(proceed)
	if err := s.AwaitCommitPause(context.Background()); err != nil {
		t.Error(err)
	}
	if s.Visible() == 0 || len(dump(t, s)) != 1 {
		t.Error("the load is not visible after the pause")
	}
	if err := errors.Join(<-committed, l.Close()); err != nil {
		t.Error(err)
	}
}

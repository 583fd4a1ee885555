package lease

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestNothingWaitsForTheEndOfALeaseInAFailedStore: no lease can end any more, so all that wait for that get the reason.
func TestNothingWaitsForTheEndOfALeaseInAFailedStore(t *testing.T) {
	fs := vfs.NewFaulty(vfs.NewMem())
	h := mustOpen(t, fs, Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	h.mustGrant(2, time.Hour)
	h.mustGrant(3, time.Hour)
	if _, err := h.Acquire(t.Context(), NewAttempt(), []byte("lock"), 1, nil, false); err != nil {
		t.Fatal(err)
	}
	waiting := make(chan error, 1)
	go func() {
		_, err := h.Acquire(t.Context(), NewAttempt(), []byte("lock"), 2, nil, true)
		waiting <- err
	}()
	for h.Stats().Waiters == 0 {
		time.Sleep(time.Millisecond)
	}
	fs.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpSyncData, Name: "*.log", Err: syscall.EIO})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := h.Revoke(ctx, 3); !errors.Is(err, mvcc.ErrFailed) {
		t.Errorf("revoke: %v", err)
	}
	select {
	case err := <-waiting:
		if !errors.Is(err, mvcc.ErrFailed) {
			t.Errorf("acquire: %v", err)
		}
	case <-ctx.Done():
		t.Error("a request waits for a lock that cannot become free")
	}
}

package lease

import (
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestListsOfALeaseHaveTheSessionsOfLeases: they leave those of all others alone.
func TestListsOfALeaseHaveTheSessionsOfLeases(t *testing.T) {
	o := storeOptions(vfs.NewMem())
	o.Limits.SessionsBeside = 1
	h, err := tryOpenStore(t, o, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer h.stop()
	h.mustGrant(1, time.Hour)
	x, err := h.store.SessionOf(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, _, _, ofKeys := h.Keys(t.Context(), 1, nil, 10)
	_, _, _, ofLocks := h.Locks(t.Context(), 1, nil, 10)
	x.Close()
	for _, err := range []error{ofKeys, ofLocks} {
		if !errors.Is(err, mvcc.ErrTooManySessions) {
			t.Errorf("beside another request for leases, which has the only session: %v", err)
		}
	}
	if _, _, _, err := h.Keys(t.Context(), 1, nil, 10); err != nil {
		t.Error(err)
	}
}

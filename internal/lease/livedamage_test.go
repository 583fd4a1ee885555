package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// unreadable are those leases of which a damaged page hides the record now.
func (h *harness) unreadable(ids []ID) (hidden []ID) {
	h.t.Helper()
	x, err := h.store.Session()
	if err != nil {
		h.t.Fatal(err)
	}
	defer x.Close()
	for _, id := range ids {
		if _, err := x.NewestVersion(context.Background(), leaseLatch(id)); errors.Is(err, mvcc.ErrDamaged) {
			hidden = append(hidden, id)
		}
	}
	return hidden
}

// TestAGrantTakesNoLeaseOverThatLives: damage of the record of a lease that is in memory is no reason to believe that the lease is not known. Its keys stay,
// and those that wait for its end do.
func TestAGrantTakesNoLeaseOverThatLives(t *testing.T) {
	fs := vfs.NewMem()
	so := storeOptions(fs)
	so.Storage.PageSize = 512
	h, err := tryOpenStore(t, so, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer h.stop()
	for id := ID(1); id <= 100; id++ {
		h.mustGrant(id, time.Hour)
		h.mustPut(fmt.Sprintf("k%03d", id), "", id)
	}
	if err := h.store.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	prefix := []byte{byte(keys.SpaceSystem), keys.SystemLease}
	damageLeaves(t, fs, func(first, last []byte) bool { return bytes.HasPrefix(first, prefix) && bytes.HasPrefix(last, prefix) })
	hidden := h.unreadable(h.ids())
	if len(hidden) < 10 {
		t.Fatalf("the records of leases %d cannot be read: the test tests too little", hidden)
	}
	for _, id := range hidden {
		before, err := h.find(id)
		if err != nil {
			t.Fatal(err)
		}
		if err := h.grant(id, time.Second); !errors.Is(err, ErrExists) {
			t.Errorf("a grant with the id of lease %d, which lives: %v", id, err)
		}
		if after, err := h.find(id); after != before || err != nil {
			t.Fatalf("lease %d was replaced: %v", id, err)
		}
	}
	if err := h.Revoke(t.Context(), hidden[0]); err != nil || h.found(fmt.Sprintf("k%03d", hidden[0])) {
		t.Errorf("its revocation: %v", err)
	}
	h.mustGrant(hidden[0], time.Hour)
}

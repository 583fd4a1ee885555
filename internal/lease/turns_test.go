package lease

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// openAlone opens leases without the goroutine that ends them.
func openAlone(t *testing.T, o Options) *harness {
	t.Helper()
	store, err := mvcc.Open(storeOptions(vfs.NewMem()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = store.Close() })
	m, err := Open(context.Background(), store, o)
	if err != nil {
		t.Fatal(err)
	}
	return &harness{Manager: m, t: t, store: store}
}

// TestRecordsOfLongLeasesHoldFewLatches: puts wait for the latches of each commit.
func TestRecordsOfLongLeasesHoldFewLatches(t *testing.T) {
	const count = 2*longStepKeys + 1
	clock, o := fakeClock()
	h := openAlone(t, o)
	for id := range ID(count) {
		h.mustGrant(1+id, 2*recordFrom)
	}
	clock.Store(int64(recordEvery + time.Second))
	before := h.store.Visible()
	h.record(context.Background())
	if commits := h.store.Visible() - before; commits != 3 {
		t.Errorf("%d leases were recorded in %d commits", count, commits)
	}
}

// TestALeaseWithManyKeysDoesNotKeepOthers: both are due at once, and the one with many keys is first. A turn deletes a few of them, and ends
// the other lease.
func TestALeaseWithManyKeysDoesNotKeepOthers(t *testing.T) {
	const count, step = 30, 3
	clock, o := fakeClock()
	o.StepKeys = step
	h, ctx := openAlone(t, o), context.Background()
	h.turnTime = 0
	h.mustGrant(1, time.Second)
	h.mustGrant(2, 2*time.Second)
	key := func(i int) string { return fmt.Sprintf("k%02d", i) }
	for i := range count {
		h.mustPut(key(i), "", 1)
	}
	h.mustPut("other", "", 2)
	left := func() (n int) {
		for i := range count {
			if h.found(key(i)) {
				n++
			}
		}
		return n
	}
	clock.Store(int64(time.Minute))
	h.revokeAll(ctx, h.takeDue(turnMax))
	if _, err := h.Lease(t.Context(), 2); !errors.Is(err, ErrNotFound) || h.found("other") {
		t.Errorf("the other lease lives on: %v", err)
	}
	if n := left(); n != count-step {
		t.Errorf("%d of %d keys are left after one turn, want %d", n, count, count-step)
	}
	turns := 1
	for _, err := h.Lease(t.Context(), 1); err == nil && turns <= count; _, err = h.Lease(t.Context(), 1) {
		h.revokeAll(ctx, h.takeDue(turnMax))
		turns++
	}
	if n := left(); n != 0 || turns != count/step {
		t.Errorf("%d keys are left after %d turns", n, turns)
	}
	h.checkRecords()
}

package lease

import (
	"context"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// The tests of this file take the orders of steps that a race would find only now and then.

// TestRevocationFindsThePutThatWasCheckedBefore stops a put between the check of its lease and its installation.
func TestRevocationFindsThePutThatWasCheckedBefore(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	checked, proceed := make(chan struct{}), make(chan struct{})
	h.store.GuardLeases(mvcc.LeaseGuard{Room: func(id uint64) int { return h.room(ID(id)) }, Admit: func(id uint64, keys int) error {
		err := h.admit(ID(id), keys)
		close(checked)
		<-proceed
		return err
	}})
	put, revoked := make(chan error, 1), make(chan error, 1)
	go func() { put <- h.put("k", "", 1) }()
	<-checked
	go func() { revoked <- h.Revoke(context.Background(), 1) }()
	select {
	case err := <-revoked:
		t.Errorf("the lease ended while a put held its latch: %v", err)
		revoked <- err
	case <-time.After(50 * time.Millisecond): // time enough for a revocation that does not wait
	}
	close(proceed)
	if err := <-put; err != nil {
		t.Fatal(err)
	}
	if err := <-revoked; err != nil {
		t.Fatal(err)
	}
	if h.found("k") {
		t.Error("the key of a lease that has ended is left")
	}
	h.checkRecords()
}

// TestRevocationThatHasBegunGoesOnAfterARestart stops it after the first of several commits.
func TestRevocationThatHasBegunGoesOnAfterARestart(t *testing.T) {
	fs := vfs.NewMem()
	h := mustOpen(t, fs, Options{})
	h.mustGrant(1, time.Hour)
	for _, key := range []string{"a", "b", "c"} {
		h.mustPut(key, "", 1)
	}
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	e, err := h.find(1)
	if err != nil {
		t.Fatal(err)
	}
	step, more, err := h.attachments(ctx, x, 1, nil, 2, 1<<20, nil)
	if err != nil || len(step) != 2 || !more {
		t.Fatalf("%d attachments, more %v, %v", len(step), more, err)
	}
	epoch, _, err := h.commitRevocation(ctx, x, e, step, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.store.Wait(ctx, epoch, mvcc.DurabilitySync); err != nil {
		t.Fatal(err)
	}
	x.Close()
	crashed := fs.Crash(1, vfs.SurviveNone)
	h.stop()
	h = mustOpen(t, crashed, Options{})
	defer h.stop()
	for deadline := time.Now().Add(10 * time.Second); len(h.ids()) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the rest of the revocation is not done")
		}
	}
	if h.found("c") {
		t.Error("a key is left")
	}
	h.checkRecords()
}

// TestRecordDecidedBeforeAKeepAliveIsNotWrittenAfterIt has the removal of a keep-alive between decision and commit.
func TestRecordDecidedBeforeAKeepAliveIsNotWrittenAfterIt(t *testing.T) {
	fs := vfs.NewMem()
	clock, o := fakeClock()
	h := mustOpen(t, fs, o)
	h.mustGrant(1, time.Hour)
	clock.Store(int64(58 * time.Minute))
	decided := h.longLeases()
	if len(decided) != 1 {
		t.Fatalf("%d leases are to be recorded", len(decided))
	}
	e, err := h.find(1)
	if err != nil {
		t.Fatal(err)
	}
	if err := h.clearRecorded(context.Background(), e); err != nil { // the first half of a keep-alive
		t.Fatal(err)
	}
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	if err := h.recordRemaining(context.Background(), x, decided); err != nil {
		t.Fatal(err)
	}
	x.Close()
	if _, err := h.KeepAlive(context.Background(), 1); err != nil {
		t.Fatal(err)
	}
	h.stop()
	h = mustOpen(t, fs, o)
	defer h.stop()
	if i, err := h.Lease(t.Context(), 1); err != nil || i.Remaining < time.Hour {
		t.Errorf("%v left, %v; a keep-alive was answered before the record was written", i.Remaining, err)
	}
}

// TestLeaseWhoseRecordIsBeingRemovedIsNotRecorded: the keep-alive that removes the record has not moved the deadline yet.
func TestLeaseWhoseRecordIsBeingRemovedIsNotRecorded(t *testing.T) {
	clock, o := fakeClock()
	h := mustOpen(t, vfs.NewMem(), o)
	defer h.stop()
	h.mustGrant(1, time.Hour)
	clock.Store(int64(58 * time.Minute))
	e, err := h.find(1)
	if err != nil {
		t.Fatal(err)
	}
	e.mu.Lock()
	e.clearing++
	e.mu.Unlock()
	if decided := h.longLeases(); len(decided) != 0 {
		t.Errorf("%d leases are to be recorded", len(decided))
	}
}

// TestWaiterThatLeavesPassesItsTurnOn: the release has woken it, and its client has gone at that moment.
func TestWaiterThatLeavesPassesItsTurnOn(t *testing.T) {
	table := lockTable{queues: map[string]*lockQueue{}, clients: map[string]int{}, max: 2}
	var waiters [2]*lockWaiter
	for i := range waiters {
		w, err := table.wait("", lock, attempt{ID(i + 1), 1})
		if err != nil {
			t.Fatal(err)
		}
		waiters[i] = w
	}
	table.changed(lock, Held{}, 1)
	table.leave(lock, waiters[0])
	select {
	case <-waiters[1].look:
	default:
		t.Error("the next waiter is not woken")
	}
	table.leave(lock, waiters[1])
	if len(table.queues) != 0 || table.count != 0 {
		t.Errorf("%d queues and %d waiters are left", len(table.queues), table.count)
	}
}

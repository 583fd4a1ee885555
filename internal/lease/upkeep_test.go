package lease

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// holdLatch has the latch of a lease until release is called.
func (h *harness) holdLatch(id ID) (release func()) {
	h.t.Helper()
	x, err := h.store.Session()
	if err != nil {
		h.t.Fatal(err)
	}
	held, until, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	w := &mvcc.Write{Durability: mvcc.DurabilityAsync}
	w.SetOwn()
	w.Latch(leaseLatch(id))
	w.Under(func(*mvcc.Latched) error {
		close(held)
		<-until
		return nil
	})
	go func() {
		_, err := x.Commit(context.Background(), w)
		done <- err
	}()
	<-held
	return func() {
		h.t.Helper()
		close(until)
		if err := <-done; err != nil {
			h.t.Error(err)
		}
		x.Close()
	}
}

// TestNoLeaseWaitsForTheRecordsOfOthers: what is left of long leases is being recorded, and that waits for the latch of one of them.
func TestNoLeaseWaitsForTheRecordsOfOthers(t *testing.T) {
	clock, o := fakeClock()
	h, err := tryOpen(t, vfs.NewMem(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer h.stop()
	h.mustGrant(1, 2*recordFrom)
	h.mustGrant(2, recordFrom-time.Second)
	h.mustPut("k", "", 2)
	clock.Store(int64(recordEvery + time.Second))
	release := h.holdLatch(1)
	before := h.countRecorded()
	done := make(chan struct{})
	go func() { defer close(done); h.record(context.Background()) }()
	eventuallyTrue(t, "the lease counts as recorded", func() bool { return h.countRecorded() > before })
	if err := h.Revoke(timeout(20*time.Second), 2); err != nil || h.found("k") {
		t.Errorf("a lease beside it ends: %v", err)
	}
	release()
	<-done
}

// countRecorded is how many leases count as recorded.
func (h *harness) countRecorded() (n int) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	for _, e := range h.leases {
		e.mu.Lock()
		if e.recorded {
			n++
		}
		e.mu.Unlock()
	}
	return n
}

func eventuallyTrue(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// TestNoLeaseWaitsForRecordsThatAreReadAgain: a lease is read again, and what enters it waits for its latch.
func TestNoLeaseWaitsForRecordsThatAreReadAgain(t *testing.T) {
	fs := vfs.NewMem()
	so := storeOptions(fs)
	so.Storage.PageSize, so.Storage.StartPatience = 512, time.Millisecond
	h, err := tryOpenStore(t, so, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for id := ID(1); id <= 100; id++ {
		h.mustGrant(id, time.Hour)
		h.mustPut(fmt.Sprint("k", id), "", id)
	}
	h.stop()
	damage := func() { damageLeaves(t, fs, within(byte(keys.SpaceSystem), keys.SystemLease)) }
	damage()
	if h, err = tryOpenStore(t, so, Options{unreadEvery: time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	defer func() { h.stop() }()
	hidden := h.Damage().Hidden
	if len(hidden) < 2 {
		t.Fatalf("leases %d are hidden", hidden)
	}
	h.mustGrant(1000, time.Hour)
	release := h.holdLatch(hidden[1])
	damage() // back
	eventuallyTrue(t, "the first lease is entered", func() bool { return h.knows(hidden[0]) })
	err = h.Revoke(timeout(20*time.Second), 1000)
	entered := h.knows(hidden[1])
	release()
	if err != nil || entered {
		t.Errorf("a lease beside it ends: %v; the other one is entered: %v", err, entered)
	}
	eventuallyTrue(t, "all are read", func() bool { return h.Damage().Err == nil && h.knows(hidden[1]) })
}

package lease

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestLeasesThatCouldNotBeReadAreReadAgain: a device fails at a start, and not any more after it. The leases live on, and end, as all others; those that
// were revoked or granted again meanwhile are as that left them.
func TestLeasesThatCouldNotBeReadAreReadAgain(t *testing.T) {
	const leases = 100
	fs := vfs.NewMem()
	so := storeOptions(fs)
	so.Storage.PageSize, so.Storage.StartPatience = 512, time.Millisecond
	h, err := tryOpenStore(t, so, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for id := ID(1); id <= leases; id++ {
		h.mustGrant(id, time.Hour)
		h.mustPut(fmt.Sprintf("k%03d", id), "", id)
	}
	h.stop()
	damage := func() int { return damageLeaves(t, fs, within(byte(keys.SpaceSystem), keys.SystemLease)) }
	if damage() == 0 {
		t.Fatal("no leaf is damaged")
	}
	if h, err = tryOpenStore(t, so, Options{unreadEvery: 10 * time.Millisecond}); err != nil {
		t.Fatal(err)
	}
	defer func() { h.stop() }()
	hidden := h.Damage().Hidden
	if len(hidden) < 4 || len(h.ids()) == 0 {
		t.Fatalf("leases %d are hidden, and %d are not", hidden, len(h.ids()))
	}
	time.Sleep(100 * time.Millisecond) // several attempts
	keepAlive := func(id ID) error { _, err := h.KeepAlive(context.Background(), id); return err }
	if err := keepAlive(hidden[0]); !errors.Is(err, ErrNotFound) {
		t.Errorf("a lease that cannot be read: %v", err)
	}
	if err := h.Revoke(context.Background(), hidden[1]); err != nil {
		t.Errorf("to revoke it: %v", err)
	}
	h.mustGrant(hidden[2], 2*time.Hour)
	damage() // back
	deadline := time.Now().Add(30 * time.Second)
	for h.Damage().Err != nil && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	if d := h.Damage(); d.Err != nil || len(d.Hidden) > 0 {
		t.Fatalf("readable again: %+v", d)
	}
	if got := len(h.ids()); got != leases-1 {
		t.Errorf("%d leases of %d, of which one was revoked", got, leases)
	}
	if _, err := h.Lease(t.Context(), hidden[1]); !errors.Is(err, ErrNotFound) {
		t.Errorf("the one that was revoked: %v", err)
	}
	if info, err := h.Lease(t.Context(), hidden[2]); err != nil || info.TTL != 2*time.Hour {
		t.Errorf("the one that was granted again: %+v, %v", info, err)
	}
	if info, err := h.Lease(t.Context(), hidden[3]); err != nil || info.TTL != time.Hour || info.Remaining <= time.Hour-time.Minute {
		t.Errorf("%+v, %v", info, err)
	}
	if err := keepAlive(hidden[0]); err != nil {
		t.Errorf("a lease that was read again: %v", err)
	}
	if err := h.Revoke(context.Background(), hidden[0]); err != nil {
		t.Error(err)
	}
	if h.found(fmt.Sprintf("k%03d", hidden[0])) {
		t.Error("its key is there after its end")
	}
}

// TestAGrantReplacesWhatWasReadOfIt: its record is read after its commit, and before the grant has ended. Otherwise the lease would end at the deadline of
// the other, too.
func TestAGrantReplacesWhatWasReadOfIt(t *testing.T) {
	const id = 7
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer func() { h.stop() }()
	h.mu.Lock()
	h.enter(id, &record{ttl: time.Hour})
	h.mu.Unlock()
	h.mustGrant(id, 2*time.Hour)
	h.mu.Lock()
	defer h.mu.Unlock()
	if all := h.lines.all[0].leases; len(all) != 1 || all[0] != h.leases[id] {
		t.Errorf("%d deadlines", len(all))
	}
}

// TestALeaseIsRevokedWhileItIsReadAgain: at any time it is in memory, or known as one that could not be read.
func TestALeaseIsRevokedWhileItIsReadAgain(t *testing.T) {
	const rounds = 500
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer func() { h.stop() }()
	for id := ID(1); id <= rounds; id++ {
		h.mustGrant(id, time.Hour)
		h.mu.Lock()
		e := h.leases[id]
		delete(h.leases, id)
		h.unread.ranges = []unreadRange{{from: id, to: id + 1}}
		var both sync.WaitGroup
		both.Go(func() {
			if err := h.Revoke(context.Background(), id); err != nil {
				t.Error(err)
			}
		})
		both.Go(func() { // as readUnread does, at the end
			h.mu.Lock()
			defer h.mu.Unlock()
			h.leases[id], h.unread.ranges = e, nil
		})
		for range id % 8 { // so that sometimes both wait for the mutex, and have it in turn
			runtime.Gosched()
		}
		h.mu.Unlock()
		both.Wait()
		if t.Failed() {
			return
		}
	}
}

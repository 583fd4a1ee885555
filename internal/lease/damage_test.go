package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// damageLeaves flips a bit in each leaf for which choose returns true, by its first and last key.
func damageLeaves(t *testing.T, fs *vfs.Mem, choose func(first, last []byte) bool) (n int) {
	t.Helper()
	const pageSize = 512
	f, err := fs.Open("db/data.ekv", vfs.ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	size, err := fs.Size("db/data.ekv")
	if err != nil {
		t.Fatal(err)
	}
	for at := int64(0); at+pageSize <= size; at += pageSize {
		b := make([]byte, pageSize)
		if _, err := f.ReadAt(b, at); err != nil {
			t.Fatal(err)
		}
		if !page.IsTree(b, 0) {
			continue
		}
		v := page.Leaf(b).Layout()
		if choose(slices.Concat(v.Prefix(), v.Suffix(0)), slices.Concat(v.Prefix(), v.Suffix(v.Count()-1))) {
			b[pageSize-1] ^= 1
			if _, err := f.WriteAt(b, at); err != nil {
				t.Fatal(err)
			}
			n++
		}
	}
	return n
}

// within chooses every second leaf of which all keys begin with a prefix.
func within(prefix ...byte) func(first, last []byte) bool {
	n := 0
	return func(first, last []byte) bool {
		if !bytes.HasPrefix(first, prefix) || !bytes.HasPrefix(last, prefix) {
			return false
		}
		n++
		return n%2 == 0
	}
}

// damaged is a store with 100 leases, each with two keys and a lock, of which some pages are damaged.
func damaged(t *testing.T, choose func(first, last []byte) bool) (*harness, mvcc.Options) {
	t.Helper()
	fs := vfs.NewMem()
	o := storeOptions(fs)
	o.Storage.PageSize = 512
	h, err := tryOpenStore(t, o, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for id := ID(1); id <= 100; id++ {
		h.mustGrant(id, time.Hour)
		h.mustPut(fmt.Sprintf("k%03d", id), "", id)
		h.mustPut(fmt.Sprintf("m%03d", id), "", id)
		if _, err := h.Acquire(context.Background(), NewAttempt(), fmt.Appendf(nil, "lock %03d", id), id, nil, false); err != nil {
			t.Fatal(err)
		}
	}
	h.stop()
	if n := damageLeaves(t, fs, choose); n < 2 {
		t.Fatalf("%d leaves are damaged: the test tests too little", n)
	}
	if h, err = tryOpenStore(t, o, Options{}); err != nil {
		t.Fatalf("damage keeps the store from being opened: %v", err)
	}
	return h, o
}

// stillEnding opens the store again, and checks that leases which could not end are still to be ended.
func stillEnding(t *testing.T, h *harness, o mvcc.Options) *harness {
	t.Helper()
	stuck := h.ids()
	h.stop()
	h, err := tryOpenStore(t, o, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range stuck {
		if i, err := h.Lease(t.Context(), id); err != nil || !i.Revoking {
			t.Errorf("lease %d could not end before a start, and is %+v after it: %v", id, i, err)
		}
	}
	return h
}

// TestDamagedLeaseRecordsKeepNothingElse: leases of which the records cannot be read keep their keys and locks, until they are
// revoked or granted again. The start, and all other leases, go on.
func TestDamagedLeaseRecordsKeepNothingElse(t *testing.T) {
	h, _ := damaged(t, within(byte(keys.SpaceSystem), keys.SystemLease))
	defer h.stop()
	ctx := context.Background()
	lost, live := []ID{}, h.ids()
	for id := ID(1); id <= 100; id++ {
		if !slices.Contains(live, id) {
			lost = append(lost, id)
		}
	}
	if d := h.Damage(); len(lost) < 10 || len(live) < 10 || d.Err == nil || len(d.Hidden) == 0 || !slices.Contains(lost, d.Hidden[0]) {
		t.Fatalf("%d leases live, %d are hidden: %+v", len(live), len(lost), d)
	}
	for i, id := range lost {
		key := fmt.Sprintf("k%03d", id)
		if _, err := h.KeepAlive(ctx, id); !errors.Is(err, ErrNotFound) {
			t.Errorf("keep-alive of a hidden lease: %v", err)
		}
		if err := h.put(key, "", id); !errors.Is(err, ErrNotFound) {
			t.Errorf("put with a hidden lease: %v", err)
		}
		if !h.found(key) {
			t.Fatalf("%q is gone, though nothing says that its lease has ended", key)
		}
		if i%2 == 0 {
			h.mustGrant(id, time.Minute)
			h.mustPut(key, "", id)
		}
		if err := h.Revoke(ctx, id); err != nil {
			t.Errorf("revocation of a hidden lease: %v", err)
		}
		if held, _, err := h.Holder(ctx, fmt.Appendf(nil, "lock %03d", id)); err != nil || held.Token != 0 || h.found(key) || h.found("m"+key[1:]) {
			t.Errorf("lease %d was revoked: lock %+v, key %v, %v", id, held, h.found(key), err)
		}
	}
	if err := h.store.Checkpoint(ctx); err != nil {
		t.Fatal(err)
	}
	for _, id := range live {
		if !h.found(fmt.Sprintf("k%03d", id)) {
			t.Errorf("the key of lease %d, which lives, is gone", id)
		}
		if err := h.Revoke(ctx, id); err != nil || h.found(fmt.Sprintf("k%03d", id)) {
			t.Errorf("revocation of lease %d, which can be read: %v", id, err)
		}
	}
	for range 100 { // ids are chosen in the hidden ranges, too
		if _, _, err := h.Grant(ctx, 0, time.Minute, ""); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDamagedAttachmentsStopNoRevocation: what can be read of a lease's keys is deleted, and its locks are released. The lease
// is not gone while a page may hide others, and no other lease waits for that.
func TestDamagedAttachmentsStopNoRevocation(t *testing.T) {
	h, o := damaged(t, within(byte(keys.SpaceSystem), keys.SystemAttachment))
	defer func() { h.stop() }()
	ctx, gone := context.Background(), 0
	for id := ID(1); id <= 100; id++ {
		if err := h.Revoke(timeout(2*time.Millisecond), id); err == nil {
			gone++
			if h.found(fmt.Sprintf("k%03d", id)) || h.found(fmt.Sprintf("m%03d", id)) {
				t.Errorf("lease %d has ended, and keys of it are left", id)
			}
		}
	}
	for end := time.Now().Add(20 * time.Second); gone+h.Damage().Stuck < 100 && time.Now().Before(end); time.Sleep(time.Millisecond) {
		gone = 100 - len(h.ids())
	}
	if d := h.Damage(); d.Stuck < 10 || gone < 10 || gone+d.Stuck != 100 || !errors.Is(d.Err, mvcc.ErrDamaged) {
		t.Fatalf("%d leases have ended: %+v", gone, d)
	}
	h.mustGrant(1000, time.Hour)
	h.mustPut("late", "", 1000)
	if err := h.Revoke(ctx, 1000); err != nil || h.found("late") {
		t.Errorf("a lease beside those that cannot end: %v", err)
	}
	h = stillEnding(t, h, o)
}

// TestDamagedKeysOfALeaseStayUntilTheyAreWritten: a page of users' keys is damaged.
func TestDamagedKeysOfALeaseStayUntilTheyAreWritten(t *testing.T) {
	h, o := damaged(t, within(byte(keys.SpaceUser), 'k'))
	defer func() { h.stop() }()
	ctx := context.Background()
	for id := ID(1); id <= 100; id++ {
		_ = h.Revoke(timeout(time.Millisecond), id)
	}
	stuck := func() bool { return h.Damage().Stuck+100-len(h.ids()) == 100 }
	for end := time.Now().Add(20 * time.Second); !stuck() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if !stuck() || h.Damage().Stuck < 10 {
		t.Fatalf("%+v, %d leases", h.Damage(), len(h.ids()))
	}
	for id := ID(1); id <= 100; id++ {
		if held, _, err := h.Holder(ctx, fmt.Appendf(nil, "lock %03d", id)); err != nil || held.Token != 0 {
			t.Errorf("lock of lease %d: %+v, %v", id, held, err)
		}
		if h.found(fmt.Sprintf("m%03d", id)) {
			t.Errorf("the other key of lease %d is left", id)
		}
	}
	h = stillEnding(t, h, o)
	for _, id := range h.ids() {
		err := h.write(func(w *mvcc.Write) { w.Set(fmt.Appendf(nil, "k%03d", id), []byte("new")) })
		if err != nil {
			t.Fatal(err)
		}
	}
	h.Manager.mu.Lock()
	for e := range h.tried.damaged {
		h.unschedule(e)
		h.schedule(e, 0) // instead of ten seconds later
	}
	h.Manager.mu.Unlock()
	h.wakeUp()
	for end := time.Now().Add(20 * time.Second); len(h.ids()) > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	if left := h.ids(); len(left) > 0 || h.Damage().Err != nil {
		t.Errorf("leases %v are left: %+v", left, h.Damage())
	}
}

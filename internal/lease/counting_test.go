package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// awaitCounted returns when no count of a lease is under way or asked for, and how many attachments it may have then.
func (h *harness) awaitCounted(id ID) int {
	h.t.Helper()
	e, err := h.find(id)
	if err != nil {
		h.t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		e.mu.Lock()
		most, counted := e.attached.most, e.attached.counted
		e.mu.Unlock()
		if !counted {
			return most
		}
	}
	h.t.Fatal("the lease is counted for ever")
	return 0
}

// attachments counts what is stored.
func (h *harness) attachmentsOf(id ID) (n int) {
	h.t.Helper()
	x, err := h.store.Session()
	if err != nil {
		h.t.Fatal(err)
	}
	defer x.Close()
	lower, upper := attachmentBounds(id)
	if err := x.ScanSystem(context.Background(), lower, upper, func(_, _ []byte, _ keys.Epoch) bool { n++; return true }); err != nil {
		h.t.Fatal(err)
	}
	return n
}

// mustAttach puts a key with a lease that has room for it. Puts beside a count are counted twice, so that it may be refused first.
func (h *harness) mustAttach(key string, id ID) {
	h.t.Helper()
	err := h.put(key, "", id)
	for deadline := time.Now().Add(30 * time.Second); errors.Is(err, ErrTooManyKeys) && time.Now().Before(deadline); err = h.put(key, "", id) {
		h.awaitCounted(id)
	}
	if err != nil {
		h.t.Fatal(err)
	}
}

// TestALeaseHasABoundedNumberOfKeys: as many as it may have, and not one more, also after a restart; a put that replaces one needs no
// room, and keys that were detached leave room.
func TestALeaseHasABoundedNumberOfKeys(t *testing.T) {
	const limit = 100
	fs := vfs.NewMem()
	h := mustOpen(t, fs, Options{Keys: limit})
	h.mustGrant(1, time.Hour)
	h.mustGrant(2, time.Hour)
	for i := range limit {
		h.mustAttach(fmt.Sprintf("k%03d", i), 1)
	}
	refused := func() {
		t.Helper()
		h.awaitCounted(1)
		if err := h.put("more", "", 1); !errors.Is(err, ErrTooManyKeys) {
			t.Fatalf("key %d: %v", limit+1, err)
		}
		err := h.write(func(w *mvcc.Write) {
			w.SetWithMetadata([]byte("k000"), nil, &metadata.Fields{Lease: 1})
			w.SetWithMetadata([]byte("more"), nil, &metadata.Fields{Lease: 1})
		})
		if !errors.Is(err, ErrTooManyKeys) || h.found("more") {
			t.Fatalf("a batch with one key too many: %v", err)
		}
		for range 3 {
			h.mustPut("k000", "replaced", 1) // never refused
		}
		h.mustPut("other", "", 2)
	}
	refused()
	h.stop()
	h = mustOpen(t, fs, Options{Keys: limit})
	defer func() { h.stop() }()
	h.mustAttach("k001", 1) // the first put after a start lets the keys be counted
	refused()
	h.mustPut("k002", "detached", 0)
	h.mustAttach("more", 1)
	refusedNow := h.put("again", "", 1)
	if h.awaitCounted(1); !errors.Is(refusedNow, ErrTooManyKeys) || h.attachmentsOf(1) != limit {
		t.Fatalf("%v; %d attachments", refusedNow, h.attachmentsOf(1))
	}
	h.checkRecords()
}

// TestALeaseHasABoundedNumberOfLocks: they count as keys, and those that were released make room.
func TestALeaseHasABoundedNumberOfLocks(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{Keys: 10})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	acquire := func(i int) error {
		_, err := h.Acquire(context.Background(), NewAttempt(), fmt.Append(nil, i), 1, nil, false)
		return err
	}
	var err error
	n := 0
	for ; n <= 10 && err == nil; n++ {
		err = acquire(n)
		h.awaitCounted(1)
	}
	if !errors.Is(err, ErrTooManyKeys) || n != 11 {
		t.Fatalf("lock %d: %v", n, err)
	}
	held, _, err := h.Holder(context.Background(), []byte("0"))
	if err != nil {
		t.Fatal(err)
	}
	if released, _, err := h.Release(context.Background(), []byte("0"), held.Token); err != nil || !released {
		t.Fatal(released, err)
	}
	if err = acquire(10); errors.Is(err, ErrTooManyKeys) { // which lets the locks be counted
		h.awaitCounted(1)
		err = acquire(10)
	}
	if err != nil {
		t.Error(err)
	}
}

// TestALeaseWithEverNewKeysIsNeverFull: what is attached and deleted again leaves nothing for ever.
func TestALeaseWithEverNewKeysIsNeverFull(t *testing.T) {
	const limit = 200
	h := mustOpen(t, vfs.NewMem(), Options{Keys: limit})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	for i := range 10 * limit {
		key := fmt.Sprint("k", i)
		h.mustAttach(key, 1)
		if err := h.write(func(w *mvcc.Write) { w.Delete([]byte(key)) }); err != nil {
			t.Fatal(err)
		}
	}
	if n := h.attachmentsOf(1); n > limit {
		t.Errorf("%d attachments are left", n)
	}
}

// TestCountsDeleteNoAttachmentThatIsNeeded: keys are attached, detached and deleted while attachments are counted. In the end each
// key of the lease has its attachment, and a lease is never taken to have fewer attachments than it has.
func TestCountsDeleteNoAttachmentThatIsNeeded(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{Keys: 1 << 20})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	e, err := h.find(1)
	if err != nil {
		t.Fatal(err)
	}
	var writers sync.WaitGroup
	for i := range 4 {
		writers.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			for range 400 {
				key := fmt.Sprint("k", rng.IntN(40))
				err := h.write(func(w *mvcc.Write) {
					w.Durability = mvcc.DurabilityAsync
					switch rng.IntN(3) {
					case 0:
						w.Delete([]byte(key))
					default:
						w.SetWithMetadata([]byte(key), nil, &metadata.Fields{Lease: uint64(rng.IntN(2))})
					}
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	ended := make(chan struct{})
	go func() { writers.Wait(); close(ended) }()
	x, counts := h.store.OwnSession(), 0
	for over := false; !over; counts++ {
		select {
		case <-ended:
			over = true
		default:
		}
		if err := h.count(context.Background(), x, e); err != nil {
			t.Fatal(err)
		}
		n := h.attachmentsOf(1)
		e.mu.Lock()
		most := e.attached.most
		e.mu.Unlock()
		if most < n {
			t.Fatalf("the lease has %d attachments, and is taken to have %d at most", n, most)
		}
	}
	if e.mu.Lock(); e.attached.most != h.attachmentsOf(1) {
		t.Errorf("%d attachments were counted, and there are %d", e.attached.most, h.attachmentsOf(1))
	}
	e.mu.Unlock()
	h.checkRecords()
	t.Logf("%d counts", counts)
}

// TestCountSeesWhatWasAdmittedBefore: a put that was admitted, and whose attachment is not installed yet, is in the count.
func TestCountSeesWhatWasAdmittedBefore(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	e, _ := h.find(1)
	x := h.store.OwnSession()
	counted := make(chan error, 1)
	h.store.GuardLeases(mvcc.LeaseGuard{Room: func(id uint64) int { return h.room(ID(id)) }, Admit: func(id uint64, n int) error {
		err := h.admit(ID(id), n)
		go func() { counted <- h.count(context.Background(), x, e) }()
		time.Sleep(20 * time.Millisecond) // the count begins
		return err
	}})
	h.mustPut("k", "", 1)
	if err := <-counted; err != nil || e.attached.most < 1 {
		t.Fatalf("%d attachments, %v", e.attached.most, err)
	}
}

// TestAKeyThatIsAttachedAgainKeepsItsAttachment: it was found to be stale, and is put with the lease before it is deleted.
func TestAKeyThatIsAttachedAgainKeepsItsAttachment(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	for _, key := range []string{"again", "stale"} {
		h.mustPut(key, "", 1)
		h.mustPut(key, "", 0)
	}
	e, _ := h.find(1)
	ctx, x := context.Background(), h.store.OwnSession()
	all, _, err := h.attachments(ctx, x, 1, nil, 10, 1<<20, nil)
	if err != nil {
		t.Fatal(err)
	}
	stale, err := h.stale(ctx, x, e, all)
	if err != nil || len(stale) != 2 {
		t.Fatalf("%d stale attachments, %v", len(stale), err)
	}
	h.mustPut("again", "", 1)
	if n, err := h.deleteStale(ctx, x, e, stale); n != 1 || err != nil {
		t.Fatalf("%d attachments were deleted, %v", n, err)
	}
	h.checkRecords()
}

// TestCleanupOfAttachmentsIsTheStoresOwn: it has the origin CLEANUP.
func TestCleanupOfAttachmentsIsTheStoresOwn(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	h.mustPut("k", "", 1)
	h.mustPut("k", "", 0)
	e, _ := h.find(1)
	if err := h.count(context.Background(), h.store.OwnSession(), e); err != nil {
		t.Fatal(err)
	}
	last := h.store.Visible()
	if err := h.store.Wait(context.Background(), last, mvcc.DurabilitySync); err != nil {
		t.Fatal(err)
	}
	r := h.store.Changes().ReadLog(last, wal.TailMark{})
	defer r.Close()
	rec, ok, err := r.Next(last)
	var b batch.Reader
	if err != nil || !ok || b.Read(rec.Body) != nil || b.Header().Origin != batch.OriginCleanup {
		t.Fatalf("%+v, %v, %v, origin %v", rec, ok, err, b.Header().Origin)
	}
	if !b.Next() || !bytes.HasPrefix(b.Key, []byte{byte(keys.SpaceSystem), keys.SystemAttachment}) {
		t.Errorf("the commit begins with %q", b.Key)
	}
}

package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestKeepAliveRemovesARemainderThatARestartHasRead: what is recorded comes from before a restart, and the keep-alive from
// after it. Then the server crashes again.
func TestKeepAliveRemovesARemainderThatARestartHasRead(t *testing.T) {
	fs := vfs.NewMem()
	clock, o := fakeClock()
	h := mustOpen(t, fs, o)
	const ttl = time.Hour
	h.mustGrant(1, ttl)
	h.pass(clock, 50*time.Minute)
	h.stop()
	h = mustOpen(t, fs, o)
	if i, err := h.Lease(t.Context(), 1); err != nil || i.Remaining > 20*time.Minute {
		t.Fatalf("%v left, %v; no remainder was recorded", i.Remaining, err)
	}
	if _, err := h.KeepAlive(context.Background(), 1); err != nil {
		t.Fatal(err)
	}
	crashed := fs.Crash(1, vfs.SurviveNone)
	h.stop()
	h = mustOpen(t, crashed, o)
	defer h.stop()
	if i, err := h.Lease(t.Context(), 1); err != nil || i.Remaining < ttl {
		t.Fatalf("%v left, %v; a keep-alive was answered just before", i.Remaining, err)
	}
}

// TestGrantOfAnIDBesideTheEndOfItsLeaseLives grants between the commit of the revocation and its end in memory.
func TestGrantOfAnIDBesideTheEndOfItsLeaseLives(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	ctx := context.Background()
	h.mustGrant(1, time.Hour)
	e, err := h.find(1)
	if err != nil {
		t.Fatal(err)
	}
	h.Manager.mu.Lock()
	h.unschedule(e) // as takeDue does
	h.Manager.mu.Unlock()
	e.mu.Lock()
	e.revoking = true
	e.mu.Unlock()
	last, err := h.revoke(ctx, h.sessions.revoker, e)
	if err != nil {
		t.Fatal(err)
	}
	h.mustGrant(1, time.Minute)
	if err := h.store.Wait(ctx, last, mvcc.DurabilitySync); err != nil {
		t.Fatal(err)
	}
	h.finish(e)
	if ttl, err := h.KeepAlive(ctx, 1); err != nil || ttl != time.Minute {
		t.Errorf("%v, %v; the lease was granted after the one before had ended", ttl, err)
	}
	h.mustPut("k", "", 1)
}

// TestLeaseThatCannotBeRevokedDoesNotKeepOthers: the revocation of the first lease fails as often as it is tried. Both are due at once, and it
// is tried first.
func TestLeaseThatCannotBeRevokedDoesNotKeepOthers(t *testing.T) {
	clock, o := fakeClock()
	h := mustOpen(t, vfs.NewMem(), o)
	defer h.stop()
	h.mustGrant(1, time.Second)
	h.mustGrant(2, 2*time.Second)
	h.mustPut("a", "", 1)
	h.mustPut("b", "", 2)
	asked := 0
	h.sessions.revoker.Permit(func() error {
		if asked++; asked == 2 || asked == 3 { // of the second lease, with its latches and with its epoch
			return nil
		}
		return errors.New("not permitted")
	})
	clock.Store(int64(time.Minute))
	h.wakeUp()
	for deadline := time.Now().Add(10 * time.Second); h.found("b"); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a lease does not end, because another one cannot")
		}
	}
	if !h.found("a") {
		t.Error("the other one has been revoked")
	}
}

// TestALowerLimitOfBatchesKeepsNoLeaseFromEnding: the keys of the lease together, and one of them alone, are longer than a batch of a
// client may be after a restart.
func TestALowerLimitOfBatchesKeepsNoLeaseFromEnding(t *testing.T) {
	so := storeOptions(vfs.NewMem())
	h, err := tryOpenStore(t, so, Options{})
	if err != nil {
		t.Fatal(err)
	}
	h.mustGrant(1, time.Hour)
	for i := range 3 {
		h.mustPut(strings.Repeat(fmt.Sprint(i), 2000), "", 1)
	}
	h.stop()
	so.Limits.BatchBytes = 1 << 10
	if h, err = tryOpenStore(t, so, Options{StepBytes: so.Limits.BatchBytes}); err != nil {
		t.Fatal(err)
	}
	defer h.stop()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := h.Revoke(ctx, 1); err != nil {
		t.Error(err)
	}
}

// TestATransactionBesideTheEndOfALeaseConflicts: it has changed a key of the lease, and does not know of the lease.
func TestATransactionBesideTheEndOfALeaseConflicts(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	h.mustPut("k", "1", 1)
	x, err := h.store.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	txn, err := x.Begin(mvcc.TxnOptions{Isolation: mvcc.IsolationSnapshot})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := txn.Invoke(&mvcc.Invoke{Kind: mvcc.InvokeAdd, Key: []byte("k"), Delta: 1}); err != nil {
		t.Fatal(err)
	}
	if err := h.Revoke(context.Background(), 1); err != nil {
		t.Fatal(err)
	}
	if _, err = txn.Commit(context.Background()); !errors.As(err, new(*mvcc.ConflictError)) {
		t.Error(err)
	}
}

// TestKeepAliveOfALeaseThatCannotEndDoesNotKeepOthers: the client names both leases in one request.
func TestKeepAliveOfALeaseThatCannotEndDoesNotKeepOthers(t *testing.T) {
	clock, o := fakeClock()
	h := mustOpen(t, vfs.NewMem(), o)
	defer h.stop()
	h.mustGrant(1, time.Hour)
	h.mustGrant(2, time.Hour)
	e, err := h.find(1)
	if err != nil {
		t.Fatal(err)
	}
	e.mu.Lock()
	e.revoking = true // and nothing revokes it
	e.mu.Unlock()
	clock.Store(int64(time.Minute))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	ttls, waiting := make([]time.Duration, 3+clearingMax), atomic.Int64{}
	time.AfterFunc(endingWaitMax/4, func() {
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		waiting.Store(int64(bytes.Count(stacks, []byte("(*Manager).KeepAliveAll.func"))))
	})
	ids := append([]uint64{1, 2, 3}, slices.Repeat([]uint64{1}, clearingMax)...)
	if err := h.KeepAliveAll(ctx, ids, ttls); err != nil || ttls[0] != 0 || ttls[1] != time.Hour || ttls[2] != 0 {
		t.Errorf("%v, %v", ttls, err)
	}
	if n := waiting.Load(); n > clearingMax/2 {
		t.Errorf("%d goroutines wait for the end of the lease", n)
	}
	if _, err := h.KeepAlive(ctx, 1); !errors.Is(err, ErrRevoking) {
		t.Error(err)
	}
}

// TestLeasesEndWhileClientsHaveAllSessions.
func TestLeasesEndWhileClientsHaveAllSessions(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	h.mustPut("k", "", 1)
	var all []*mvcc.Session
	for x, err := h.store.Session(); err == nil; x, err = h.store.Session() {
		all = append(all, x)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	err := h.Revoke(ctx, 1)
	cancel()
	for _, x := range all {
		x.Close()
	}
	if err != nil || h.found("k") {
		t.Errorf("the lease does not end: %v", err)
	}
}

// TestKeysOfALeaseAreFoundWithoutTheirValues: clients choose how large these are, and nothing counts them.
func TestKeysOfALeaseAreFoundWithoutTheirValues(t *testing.T) {
	files := vfs.NewFaulty(vfs.NewMem())
	h := mustOpen(t, files, Options{})
	defer func() { h.stop() }()
	h.mustGrant(1, time.Hour)
	h.mustPut("large", string(make([]byte, 200<<10)), 1)
	if err := h.store.Checkpoint(t.Context()); err != nil {
		t.Fatal(err)
	}
	reads := files.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Slow})
	found, _, _, err := h.Keys(t.Context(), 1, nil, 10)
	if n := reads.Fired(); err != nil || len(found) != 1 || n > 10 {
		t.Errorf("%d keys with %d reads of the device, %v", len(found), n, err)
	}
}

// TestKeysOfALeaseAreBoundedInBytes, and the next answers have the rest.
func TestKeysOfALeaseAreBoundedInBytes(t *testing.T) {
	h := mustOpen(t, vfs.NewMem(), Options{})
	defer h.stop()
	h.mustGrant(1, time.Hour)
	const n = 1000
	pad := strings.Repeat("x", 2000)
	err := h.write(func(w *mvcc.Write) {
		for i := range n {
			w.SetWithMetadata(fmt.Appendf(nil, "%04d%s", i, pad), nil, &metadata.Fields{Lease: 1})
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	var after []byte
	found := 0
	for more := true; more; {
		var list [][]byte
		if list, more, _, err = h.Keys(context.Background(), 1, after, n); err != nil || len(list) == 0 || len(list) > 800 {
			t.Fatalf("%d keys, %v", len(list), err)
		}
		found, after = found+len(list), list[len(list)-1]
	}
	if found != n {
		t.Errorf("%d keys of %d", found, n)
	}
}

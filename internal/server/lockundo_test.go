package server

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestLockOfAClientThatHasGoneIsReleased: the lock is granted, and the request ends while the server waits for the device before it
// answers. The client sends nothing more, and its lease lives.
func TestLockOfAClientThatHasGoneIsReleased(t *testing.T) { testLockOfAClientThatHasGone(t, false) }

// TestLockOfAUserThatIsGoneIsReleased: its user is removed meanwhile. What the server undoes needs no right.
func TestLockOfAUserThatIsGoneIsReleased(t *testing.T) { testLockOfAClientThatHasGone(t, true) }

func testLockOfAClientThatHasGone(t *testing.T, removed bool) {
	h := mustStart(t)
	leases, locks := pb.NewLeaseServiceClient(h.conn), pb.NewLockServiceClient(h.conn)
	for id := uint64(1); id <= 2; id++ {
		if _, err := leases.GrantLease(testContext(t), &pb.GrantLeaseRequest{Id: id, Ttl: durationpb.New(time.Hour)}); err != nil {
			t.Fatal(err)
		}
	}
	until := make(chan struct{})
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until})
	release := sync.OnceFunc(func() {
		rule.Remove()
		close(until)
	})
	t.Cleanup(release)
	ctx, cancel := context.WithCancel(testContext(t))
	var gone atomic.Bool
	ctx = mvcc.WithPermit(ctx, func() error {
		if gone.Load() {
			return auth.ErrUnauthenticated
		}
		return nil
	})
	done := make(chan error, 1)
	go func() {
		_, err := (&lockService{Server: h.Server}).AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: 1})
		done <- err
	}()
	eventually(t, "the lock is granted", func() bool {
		held, _, err := h.Server.leases.Holder(t.Context(), []byte("l"))
		return err == nil && held.Lease == 1
	})
	gone.Store(removed)
	cancel()
	release()
	if err := <-done; err == nil {
		t.Log("the request was answered before it was cancelled")
	}
	out, err := locks.AcquireLock(testContext(t), &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: 2, Wait: durationpb.New(20 * time.Second)})
	if err != nil || !out.GetAcquired() {
		t.Fatalf("the lock is held for a client that has gone: %v, %v", out, err)
	}
}

// TestAttemptsAreUndoneOverTheWire, and requests to undo that say something else are refused.
func TestAttemptsAreUndoneOverTheWire(t *testing.T) {
	h := mustStart(t)
	leases, locks := pb.NewLeaseServiceClient(h.conn), pb.NewLockServiceClient(h.conn)
	if _, err := leases.GrantLease(testContext(t), &pb.GrantLeaseRequest{Id: 1, Ttl: durationpb.New(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	acquire := func(attempt uint64) error {
		_, err := locks.AcquireLock(testContext(t), &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: 1, Attempt: attempt})
		return err
	}
	undo := func(want bool, attempts ...uint64) {
		t.Helper()
		out, err := locks.ReleaseLock(testContext(t), &pb.ReleaseLockRequest{Name: []byte("l"), LeaseId: 1, Attempts: attempts})
		if err != nil || out.GetReleased() != want {
			t.Fatalf("undo %v: %v, %v", attempts, out, err)
		}
	}
	undo(false, 5)
	failureOf(t, acquire(5)).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED)
	if err := acquire(6); err != nil {
		t.Fatal(err)
	}
	undo(true, 5, 6)
	for _, wrong := range []*pb.ReleaseLockRequest{
		{Name: []byte("l"), Token: 1, Attempts: []uint64{1}},
		{Name: []byte("l"), LeaseId: 1, Attempts: []uint64{1, 0}},
		{Name: []byte("l"), LeaseId: 1, Attempts: make([]uint64, lease.UndoMax+1)},
	} {
		_, err := locks.ReleaseLock(testContext(t), wrong)
		failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	}
}

// TestTokenIsToldWhenItsNoteIsDurable: the lock is held and durable. A second attempt of its lease is answered when the note that it
// was told the token is durable, too: after a crash, to undo the first attempt must not release what the second has.
func TestTokenIsToldWhenItsNoteIsDurable(t *testing.T) {
	h := mustStart(t)
	if _, err := pb.NewLeaseServiceClient(h.conn).GrantLease(testContext(t), &pb.GrantLeaseRequest{Id: 1, Ttl: durationpb.New(time.Hour)}); err != nil {
		t.Fatal(err)
	}
	locks := pb.NewLockServiceClient(h.conn)
	first, err := locks.AcquireLock(testContext(t), &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: 1, Attempt: 1})
	if err != nil || !first.GetAcquired() {
		t.Fatal(first, err)
	}
	until := make(chan struct{})
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until})
	release := sync.OnceFunc(func() {
		rule.Remove()
		close(until)
	})
	t.Cleanup(release)
	short, cancel := context.WithTimeout(testContext(t), 50*time.Millisecond)
	defer cancel()
	request := &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: 1, Attempt: 2}
	if out, err := locks.AcquireLock(short, request); err == nil {
		t.Errorf("%v is answered while its note is not durable", out)
	}
	release()
	if out, err := locks.AcquireLock(testContext(t), request); err == nil && out.GetToken() != first.GetToken() {
		t.Errorf("token %d, and %d before", out.GetToken(), first.GetToken())
	}
}

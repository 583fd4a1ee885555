package client

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// lostAnswers is a server of locks whose answers to acquisitions are lost: the caller is cancelled at that moment.
type lostAnswers struct {
	kvpb.LockServiceClient
	cancel   context.CancelFunc
	failures int    // of AcquireLock that may be repeated, before the caller is cancelled
	token    uint64 // the caller gets this one instead of being cancelled
	acquired []uint64
	released chan *kvpb.ReleaseLockRequest
	refused  int     // of ReleaseLock
	refusals []error // of ReleaseLock, before these
}

func (l *lostAnswers) AcquireLock(_ context.Context, r *kvpb.AcquireLockRequest, _ ...grpc.CallOption) (*kvpb.AcquireLockResponse, error) {
	if l.acquired = append(l.acquired, r.GetAttempt()); len(l.acquired) <= l.failures {
		return nil, status.Error(codes.Unavailable, "the connection broke")
	}
	if l.token != 0 {
		return &kvpb.AcquireLockResponse{Acquired: true, Token: l.token}, nil
	}
	l.cancel()
	return nil, status.Error(codes.Canceled, "the caller has gone")
}

func (l *lostAnswers) ReleaseLock(_ context.Context, r *kvpb.ReleaseLockRequest, _ ...grpc.CallOption) (*kvpb.ReleaseLockResponse, error) {
	if len(l.refusals) > 0 {
		err := l.refusals[0]
		l.refusals = l.refusals[1:]
		return nil, err
	}
	if l.refused > 0 {
		l.refused--
		return nil, status.Error(codes.Unavailable, "the server is away")
	}
	l.released <- r
	return &kvpb.ReleaseLockResponse{Released: true}, nil
}

// withoutServer is a client that reaches no server, and a lease of it. The test gives it the server of its locks.
func withoutServer(t *testing.T) (*Client, *Lease) {
	t.Helper()
	c, err := Dial("localhost:1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c, &Lease{client: c, id: 7, lost: make(chan struct{}), closed: make(chan struct{})}
}

// TestCancelledLockUndoesWhatItMayHaveAcquired: every request of the call, until the server has answered, and not after the lease
// has ended.
func TestCancelledLockUndoesWhatItMayHaveAcquired(t *testing.T) {
	c, lease := withoutServer(t)
	for _, try := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		locks := &lostAnswers{cancel: cancel, released: make(chan *kvpb.ReleaseLockRequest, 1), refused: 1}
		c.locks = locks
		var err error
		if try {
			_, _, err = c.TryLock(ctx, []byte("name"), lease, nil)
		} else {
			locks.failures = 2
			_, err = c.Lock(ctx, []byte("name"), lease, nil)
		}
		if err == nil {
			t.Fatal("a call without an answer has the lock")
		}
		select {
		case r := <-locks.released:
			if string(r.GetName()) != "name" || r.GetLeaseId() != 7 || r.GetToken() != 0 || !slices.Equal(r.GetAttempts(), locks.acquired) {
				t.Errorf("released %v, acquired %v", r, locks.acquired)
			}
		case <-time.After(30 * time.Second):
			t.Fatal("nothing is undone")
		}
		if slices.Contains(locks.acquired, 0) {
			t.Errorf("attempts %v", locks.acquired)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	locks := &lostAnswers{cancel: cancel, released: make(chan *kvpb.ReleaseLockRequest, 1), refused: 1 << 30}
	c.locks = locks
	if _, err := c.Lock(ctx, []byte("name"), lease, nil); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	close(lease.closed) // goleak sees whether that ends it
}

// earlyDeadline is a server of locks whose timer is faster than its client's.
type earlyDeadline struct{ kvpb.LockServiceClient }

func (earlyDeadline) AcquireLock(context.Context, *kvpb.AcquireLockRequest, ...grpc.CallOption) (*kvpb.AcquireLockResponse, error) {
	return nil, status.Error(codes.DeadlineExceeded, "the deadline passed")
}

func (earlyDeadline) ReleaseLock(context.Context, *kvpb.ReleaseLockRequest, ...grpc.CallOption) (*kvpb.ReleaseLockResponse, error) {
	return &kvpb.ReleaseLockResponse{}, nil
}

// TestLockEndsWithTheCauseOfItsContext: also if the server tells first that the deadline has passed.
func TestLockEndsWithTheCauseOfItsContext(t *testing.T) {
	c, lease := withoutServer(t)
	c.locks = earlyDeadline{}
	cause := errors.New("waited long enough")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 20*time.Millisecond, cause)
	defer cancel()
	if _, err := c.Lock(ctx, []byte("name"), lease, nil); !errors.Is(err, cause) {
		t.Fatal(err)
	}
	if _, err := c.Lock(t.Context(), []byte("name"), lease, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}

// TestRepeatedLockUndoesItsLostRequests: the call has the lock with its last request. An earlier one may still be on its way, and
// would acquire the lock anew after it was released.
func TestRepeatedLockUndoesItsLostRequests(t *testing.T) {
	c, lease := withoutServer(t)
	defer close(lease.closed)
	locks := &lostAnswers{failures: 2, token: 5, released: make(chan *kvpb.ReleaseLockRequest, 2)}
	c.locks = locks
	lock, err := c.Lock(t.Context(), []byte("name"), lease, nil)
	if err != nil || lock.Token() != 5 {
		t.Fatal(lock, err)
	}
	select {
	case r := <-locks.released:
		if r.GetToken() != 0 || r.GetLeaseId() != 7 || !slices.Equal(r.GetAttempts(), locks.acquired[:2]) {
			t.Errorf("released %v, acquired %v", r, locks.acquired)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("nothing is undone")
	}
}

// TestUndoOutlivesRefusals: whatever a server refuses to undo an attempt for, the lock stays held as long as the lease is kept alive, so
// the client asks again.
func TestUndoOutlivesRefusals(t *testing.T) {
	c, lease := withoutServer(t)
	defer close(lease.closed)
	ctx, cancel := context.WithCancel(t.Context())
	locks := &lostAnswers{cancel: cancel, released: make(chan *kvpb.ReleaseLockRequest, 1), refusals: []error{
		refusal(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_OVERLOADED),
		refusal(codes.ResourceExhausted, kvpb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS),
		refusal(codes.Unauthenticated, kvpb.ErrorReason_ERROR_REASON_TOKEN_EXPIRED),
		refusal(codes.Unavailable, kvpb.ErrorReason_ERROR_REASON_READ_ONLY),
		refusal(codes.PermissionDenied, kvpb.ErrorReason_ERROR_REASON_PERMISSION_DENIED),
	}}
	c.locks = locks
	if _, err := c.Lock(ctx, []byte("name"), lease, nil); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	select {
	case r := <-locks.released:
		if !slices.Equal(r.GetAttempts(), locks.acquired) {
			t.Errorf("released %v, acquired %v", r, locks.acquired)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("nothing is undone")
	}
}

// refusingLocks is a server of locks that refuses acquisitions.
type refusingLocks struct {
	kvpb.LockServiceClient
	undone chan struct{}
}

func (refusingLocks) AcquireLock(context.Context, *kvpb.AcquireLockRequest, ...grpc.CallOption) (*kvpb.AcquireLockResponse, error) {
	return nil, refusal(codes.PermissionDenied, kvpb.ErrorReason_ERROR_REASON_PERMISSION_DENIED)
}

func (l refusingLocks) ReleaseLock(context.Context, *kvpb.ReleaseLockRequest, ...grpc.CallOption) (*kvpb.ReleaseLockResponse, error) {
	close(l.undone)
	return &kvpb.ReleaseLockResponse{}, nil
}

// TestRefusedLockIsNotUndone: nothing was acquired, and to undo it would be refused as well, again and again.
func TestRefusedLockIsNotUndone(t *testing.T) {
	c, err := Dial("localhost:1")
	if err != nil {
		t.Fatal(err)
	}
	locks := refusingLocks{undone: make(chan struct{})}
	c.locks = locks
	lease := &Lease{client: c, id: 7, lost: make(chan struct{}), closed: make(chan struct{})}
	if _, _, err := c.TryLock(t.Context(), []byte("name"), lease, nil); err == nil {
		t.Error("acquired")
	}
	if _, err := c.Lock(t.Context(), []byte("name"), lease, nil); err == nil {
		t.Error("acquired")
	}
	if err := c.background.wait(30 * time.Second); err != nil {
		t.Error(err)
	}
	select {
	case <-locks.undone:
		t.Error("what was refused is undone")
	default:
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

package server

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"slices"
	"strconv"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// lockService implements LockService. A request that waits for a lock has neither a session nor admission.
type lockService struct {
	pb.UnimplementedLockServiceServer
	*Server
}

// errWaited ends the wait for a lock.
var errWaited = errors.New("the lock was held all the time")

// AcquireLock implements Locks.
func (s *lockService) AcquireLock(ctx context.Context, req *pb.AcquireLockRequest) (*pb.AcquireLockResponse, error) {
	out := new(pb.AcquireLockResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodAcquireLock, func() error {
		if err := s.refusesWrites(); err != nil {
			return err
		}
		attempt := cmp.Or(req.GetAttempt(), lease.NewAttempt())
		held, err := s.acquireLock(ctx, req, attempt)
		if err != nil && !errors.Is(err, lease.ErrHeld) {
			return err
		}
		out.Acquired, out.Token, out.LeaseId = err == nil, uint64(held.Token), uint64(held.Lease)
		err = s.awaitOwn(ctx, held.Await)
		if out.Acquired && ctx.Err() != nil { // the client gets no answer
			s.undo(ctx, req, attempt)
		}
		return err
	})
}

// undo undoes an attempt of which the client gets no answer, also if the rights of its user have ended since. If it fails, the lock is held until its
// lease ends.
func (s *lockService) undo(ctx context.Context, req *pb.AcquireLockRequest, attempt uint64) {
	const patience = 10 * time.Second
	ctx, cancel := context.WithTimeout(mvcc.WithPermit(context.WithoutCancel(ctx), nil), patience)
	defer cancel()
	if _, _, err := s.leases.Undo(ctx, req.GetName(), lease.ID(req.GetLeaseId()), []uint64{attempt}); err != nil {
		s.log.Warn("a lock was acquired for a client that has gone, and could not be released", "cause", err)
	}
}

// acquireLock acquires a lock, or returns lease.ErrHeld with its holder.
func (s *lockService) acquireLock(ctx context.Context, req *pb.AcquireLockRequest, attempt uint64) (lease.Held, error) {
	wait := req.GetWait().AsDuration()
	if wait <= 0 {
		return s.leases.Acquire(ctx, attempt, req.GetName(), lease.ID(req.GetLeaseId()), req.GetValue(), false)
	}
	permitted, mended, done := s.untilDenied(ctx)
	defer done()
	waiting, stop := context.WithTimeoutCause(permitted, wait, errWaited)
	defer stop()
	held, err := s.leases.Acquire(waiting, attempt, req.GetName(), lease.ID(req.GetLeaseId()), req.GetValue(), true)
	if err = mended(err); errors.Is(err, errWaited) { // the last look tells the holder
		return s.leases.Acquire(ctx, attempt, req.GetName(), lease.ID(req.GetLeaseId()), req.GetValue(), false)
	}
	return held, err
}

// ReleaseLock implements Locks.
func (s *lockService) ReleaseLock(ctx context.Context, req *pb.ReleaseLockRequest) (*pb.ReleaseLockResponse, error) {
	out := new(pb.ReleaseLockResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodReleaseLock, func() (err error) {
		var epoch keys.Epoch
		switch token, attempts := req.GetToken(), req.GetAttempts(); {
		case token != 0 && len(attempts) > 0:
			return invalid("token", "and attempts are given; give one of the two")
		case len(attempts) > lease.UndoMax:
			return invalid("attempts", "has more than "+strconv.Itoa(lease.UndoMax)+" numbers")
		case slices.Contains(attempts, 0):
			return invalid("attempts", "has a 0; give the attempts of the requests")
		case len(attempts) > 0:
			out.Released, epoch, err = s.leases.Undo(ctx, req.GetName(), lease.ID(req.GetLeaseId()), attempts)
		case token == 0:
			return invalid("token", "is 0; give the token of the acquisition")
		default:
			out.Released, epoch, err = s.leases.Release(ctx, req.GetName(), keys.Epoch(token))
		}
		if err != nil {
			return err
		}
		return s.awaitOwn(ctx, epoch)
	})
}

// GetLock implements Locks.
func (s *lockService) GetLock(ctx context.Context, req *pb.GetLockRequest) (*pb.GetLockResponse, error) {
	out := new(pb.GetLockResponse)
	return out, s.serveRead(ctx, telemetry.MethodGetLock, func() error {
		held, await, err := s.leases.Holder(ctx, req.GetName())
		if err != nil {
			return err
		}
		out.Holder = holderMessage(&held)
		return ackRead(await).wait(ctx, s.store)
	})
}

// ObserveLock implements Locks.
func (s *lockService) ObserveLock(req *pb.ObserveLockRequest, stream grpc.ServerStreamingServer[pb.ObserveLockResponse]) error {
	return s.serveStream(stream.Context(), telemetry.MethodObserveLock, func(*connection) error {
		permitted := accessOf(stream.Context())
		ctx, mended, stop := s.untilDenied(stream.Context())
		defer stop()
		return mended(s.leases.Observe(ctx, req.GetName(), func(held lease.Held, await keys.Epoch) error {
			if err := ackRead(await).wait(ctx, s.store); err != nil {
				return err
			}
			if err := permitted.again(); err != nil { // the context ends a moment after the users have changed
				return err
			}
			return stream.Send(&pb.ObserveLockResponse{Holder: holderMessage(&held)})
		}))
	})
}

// ListLocks implements Locks.
func (s *lockService) ListLocks(ctx context.Context, req *pb.ListLocksRequest) (*pb.ListLocksResponse, error) {
	out := new(pb.ListLocksResponse)
	return out, s.serveRead(ctx, telemetry.MethodListLocks, func() error {
		b, err := toBounds(&pb.KeyRange{Start: req.GetStart(), End: req.GetEnd()})
		if err != nil {
			return err
		}
		limit := int(req.GetLimit())
		if limit == 0 || limit > leaseListMax {
			limit = leaseListMax
		}
		lower := b.lower
		if after := req.GetAfter(); len(after) > 0 && bytes.Compare(after, lower) >= 0 { // never before the range, whose rights were checked
			lower = append(bytes.Clone(after), 0)
		}
		if len(b.upper) > 0 && bytes.Compare(lower, b.upper) >= 0 {
			return nil
		}
		found, more, await, err := s.leases.ListLocks(ctx, lower, b.upper, limit)
		if err != nil {
			return err
		}
		out.More = more
		for i := range found {
			out.Locks = append(out.Locks, lockMessage(&found[i]))
		}
		return ackRead(await).wait(ctx, s.store)
	})
}

func lockMessage(l *lease.LockInfo) *pb.Lock {
	m := &pb.Lock{Name: l.Name, Holder: holderMessage(&l.Held), Waiters: uint32(l.Waiters)} //nolint:gosec // bounded by the requests that wait
	for _, id := range l.Waiting {
		m.WaitingLeases = append(m.WaitingLeases, uint64(id))
	}
	return m
}

func holderMessage(h *lease.Held) *pb.LockHolder {
	return &pb.LockHolder{LeaseId: uint64(h.Lease), Token: uint64(h.Token), Value: h.Value}
}

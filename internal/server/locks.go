package server

import (
	"context"
	"errors"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// lockService implements the Locks service. A request that waits for a lock has neither a session nor admission.
type lockService struct {
	pb.UnimplementedLocksServer
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
		held, err := s.acquireLock(ctx, req)
		if err != nil && !errors.Is(err, lease.ErrHeld) {
			return err
		}
		out.Acquired, out.Token, out.LeaseId = err == nil, uint64(held.Token), uint64(held.Lease)
		return s.awaitOwn(ctx, held.Token)
	})
}

// acquireLock acquires a lock, or returns lease.ErrHeld with its holder.
func (s *lockService) acquireLock(ctx context.Context, req *pb.AcquireLockRequest) (lease.Held, error) {
	wait := req.GetWait().AsDuration()
	if wait <= 0 {
		return s.leases.Acquire(ctx, req.GetName(), lease.ID(req.GetLeaseId()), req.GetValue(), false)
	}
	waiting, done := s.untilDrain(ctx)
	defer done()
	waiting, stop := context.WithTimeoutCause(waiting, wait, errWaited)
	defer stop()
	held, err := s.leases.Acquire(waiting, req.GetName(), lease.ID(req.GetLeaseId()), req.GetValue(), true)
	if errors.Is(err, errWaited) { // the last look tells the holder
		return s.leases.Acquire(ctx, req.GetName(), lease.ID(req.GetLeaseId()), req.GetValue(), false)
	}
	return held, err
}

// ReleaseLock implements Locks.
func (s *lockService) ReleaseLock(ctx context.Context, req *pb.ReleaseLockRequest) (*pb.ReleaseLockResponse, error) {
	out := new(pb.ReleaseLockResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodReleaseLock, func() error {
		if req.GetToken() == 0 {
			return invalid("token", "is 0; give the token of the acquisition")
		}
		released, epoch, err := s.leases.Release(ctx, req.GetName(), keys.Epoch(req.GetToken()))
		if err != nil {
			return err
		}
		out.Released = released
		return s.awaitOwn(ctx, epoch)
	})
}

// GetLock implements Locks.
func (s *lockService) GetLock(ctx context.Context, req *pb.GetLockRequest) (*pb.GetLockResponse, error) {
	out := new(pb.GetLockResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodGetLock, func() error {
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
		ctx, done := s.untilDrain(stream.Context())
		defer done()
		return s.leases.Observe(ctx, req.GetName(), func(held lease.Held, await keys.Epoch) error {
			if err := ackRead(await).wait(ctx, s.store); err != nil {
				return err
			}
			return stream.Send(&pb.ObserveLockResponse{Holder: holderMessage(&held)})
		})
	})
}

func holderMessage(h *lease.Held) *pb.LockHolder {
	return &pb.LockHolder{LeaseId: uint64(h.Lease), Token: uint64(h.Token), Value: h.Value}
}

package server

import (
	"context"
	"errors"
	"io"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/lease"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// leaseService implements LeaseService. Its requests are not refused for overload: a keep-alive that is refused would
// end the lease of a client that does nothing wrong. Streams and sessions bound them.
type leaseService struct {
	pb.UnimplementedLeaseServiceServer
	*Server
}

// leaseListMax is how many ids, leases or keys one message has at most.
const leaseListMax = 10_000

// errTooManyIDs refuses a keep-alive.
var errTooManyIDs = invalid("ids", "has more than "+strconv.Itoa(leaseListMax)+" ids")

// GrantLease implements Leases.
func (s *leaseService) GrantLease(ctx context.Context, req *pb.GrantLeaseRequest) (*pb.GrantLeaseResponse, error) {
	out := new(pb.GrantLeaseResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodGrantLease, func() error {
		if err := s.refusesWrites(); err != nil {
			return err
		}
		if err := s.checkTakeover(ctx, lease.ID(req.GetId())); err != nil {
			return err
		}
		info, epoch, err := s.leases.Grant(ctx, lease.ID(req.GetId()), req.GetTtl().AsDuration(), req.GetOwner())
		if err != nil {
			return err
		}
		out.Id, out.Ttl = uint64(info.ID), durationpb.New(info.TTL)
		return s.awaitOwn(ctx, epoch)
	})
}

// checkTakeover is nil if a grant takes over nothing that can be read and that the caller may not revoke. Nothing can be attached meanwhile to a lease that
// could not be read. What a page hides is not known, and must stop no grant of a new lease: one page may hide every id.
func (s *Server) checkTakeover(ctx context.Context, id lease.ID) error {
	if id == 0 || !s.leases.Unread(id) {
		return nil
	}
	err := s.checkAttached(ctx, id, s.leases.ReadableKeys, s.leases.ReadableLocks)
	if errors.Is(err, lease.ErrNotFound) {
		return &lease.Error{ID: id, Err: lease.ErrExists}
	}
	return err
}

// refusesWrites refuses what needs a commit while the server drains.
func (s *Server) refusesWrites() error {
	if s.drain.active.Load() {
		return errShuttingDown
	}
	return nil
}

// awaitOwn waits until a commit of the server is durable.
func (s *Server) awaitOwn(ctx context.Context, epoch keys.Epoch) error {
	return ackWait{epoch: epoch, durability: mvcc.DurabilitySync, write: true}.wait(ctx, s.store)
}

// RevokeLease implements Leases.
func (s *leaseService) RevokeLease(ctx context.Context, req *pb.RevokeLeaseRequest) (*pb.RevokeLeaseResponse, error) {
	return new(pb.RevokeLeaseResponse), s.serveAdmin(ctx, telemetry.MethodRevokeLease, func() error {
		if err := s.checkRevocation(ctx, lease.ID(req.GetId())); err != nil {
			return err
		}
		ctx, done := s.untilDrain(ctx)
		defer done()
		return s.leases.Revoke(ctx, lease.ID(req.GetId()))
	})
}

// checkRevocation is nil if the caller may revoke a lease.
func (s *Server) checkRevocation(ctx context.Context, id lease.ID) error {
	return s.checkAttached(ctx, id, s.leases.Keys, s.leases.Locks)
}

// attached are keys or names of locks that a lease has; see lease.Manager.Keys.
type attached func(ctx context.Context, id lease.ID, after []byte, limit int) (found [][]byte, more bool, await keys.Epoch, err error)

// checkAttached is nil if the caller may delete the keys, and release the locks. If its rights change while they are read, it begins again.
func (s *Server) checkAttached(ctx context.Context, id lease.ID, leased, locks attached) error {
	for {
		user := accessOf(ctx).user()
		if err := s.checkHeld(ctx, id, auth.RightWrite, leased); err != nil {
			return err
		}
		if err := s.checkHeld(ctx, id, auth.RightLease, locks); err != nil { // as ReleaseLock needs
			return err
		}
		if err := s.checkAgain(ctx); err != nil || accessOf(ctx).user() == user {
			return err
		}
	}
}

// checkLeaseKeys is nil if the caller has a right to all keys of a lease. Otherwise it is the error of a lease that does not exist:
// whether other users have attached keys is not told.
func (s *Server) checkLeaseKeys(ctx context.Context, id lease.ID, right auth.Right) error {
	return s.checkHeld(ctx, id, right, s.leases.Keys)
}

func (s *Server) checkHeld(ctx context.Context, id lease.ID, right auth.Right, held attached) error {
	user := accessOf(ctx).user()
	if user == nil {
		return nil
	}
	for after, more := []byte(nil), true; more; {
		var found [][]byte
		var err error
		if found, more, _, err = held(ctx, id, after, leaseListMax); err != nil {
			return err
		}
		if err := checkFound(user, id, right, found); err != nil {
			return err
		}
		if more = more && len(found) > 0; more {
			after = found[len(found)-1]
		}
	}
	return nil
}

// checkFound is checkLeaseKeys for some of the keys.
func checkFound(user *auth.User, id lease.ID, right auth.Right, found [][]byte) error {
	if user == nil {
		return nil
	}
	var f footprint
	f.begin(user)
	for _, key := range found {
		f.add(right, auth.Range{Lower: key, Single: true, Hidden: true})
	}
	if f.end() != nil {
		return &lease.Error{ID: id, Err: lease.ErrNotFound}
	}
	return nil
}

// KeepAlive implements Leases.
func (s *leaseService) KeepAlive(stream grpc.BidiStreamingServer[pb.KeepAliveRequest, pb.KeepAliveResponse]) error {
	return s.serveStream(stream.Context(), telemetry.MethodKeepAlive, func(*connection) error {
		received := make(chan error, 1)
		s.drain.receivers.Go(func() { received <- s.keepAlives(stream) })
		select {
		case err := <-received:
			return err
		case <-s.drain.begun:
			return errShuttingDown // the receiver ends with the stream
		}
	})
}

// keepAlives answers the requests of one stream.
func (s *leaseService) keepAlives(stream grpc.BidiStreamingServer[pb.KeepAliveRequest, pb.KeepAliveResponse]) error {
	for {
		req, err := stream.Recv()
		if err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		out, err := s.keepAlive(stream.Context(), req)
		if err != nil {
			return err
		}
		held, err := s.admission.charge(connectionOf(stream.Context()), out.SizeVT(), false)
		if err != nil {
			return err
		}
		messageDropped(stream.Context())
		if err := stream.SendMsg(held.of(out)); err != nil {
			held.release()
			return err
		}
	}
}

func (s *leaseService) keepAlive(ctx context.Context, req *pb.KeepAliveRequest) (*pb.KeepAliveResponse, error) {
	m := &keepAliveMessages{}
	m.in.Ids = req.GetIds()
	return &m.out, m.keepAlive(ctx, s.Server)
}

// GetLease implements Leases.
func (s *leaseService) GetLease(ctx context.Context, req *pb.GetLeaseRequest) (*pb.GetLeaseResponse, error) {
	out := new(pb.GetLeaseResponse)
	return out, s.serveRead(ctx, telemetry.MethodGetLease, func() error {
		info, err := s.leases.Lease(ctx, lease.ID(req.GetId()))
		if err != nil {
			return err
		}
		out.Lease = leaseMessage(&info)
		if req.GetKeys() == 0 {
			return nil
		}
		if err := s.checkLeaseKeys(ctx, info.ID, auth.RightRead); err != nil {
			return err
		}
		after := req.GetAfter()
		if len(after) == 0 {
			after = nil
		}
		found, more, await, err := s.leases.Keys(ctx, info.ID, after, int(min(req.GetKeys(), leaseListMax)))
		if err == nil {
			err = s.checkAgain(ctx)
		}
		if err == nil { // some may have been attached since all of them were checked
			err = checkFound(accessOf(ctx).user(), info.ID, auth.RightRead, found)
		}
		if err != nil {
			return err
		}
		out.Keys, out.More = found, more
		return ackRead(await).wait(ctx, s.store)
	})
}

// ListLeases implements Leases.
func (s *leaseService) ListLeases(ctx context.Context, req *pb.ListLeasesRequest) (*pb.ListLeasesResponse, error) {
	out := new(pb.ListLeasesResponse)
	return out, s.serveRead(ctx, telemetry.MethodListLeases, func() error {
		limit := int(req.GetLimit())
		if limit == 0 || limit > leaseListMax {
			limit = leaseListMax
		}
		found, more, err := s.leases.List(ctx, lease.ID(req.GetAfter()), limit)
		if err != nil {
			return err
		}
		out.More = more
		for i := range found {
			out.Leases = append(out.Leases, leaseMessage(&found[i]))
		}
		return nil
	})
}

func leaseMessage(i *lease.Info) *pb.Lease {
	return &pb.Lease{
		Id: uint64(i.ID), Ttl: durationpb.New(i.TTL), Remaining: durationpb.New(i.Remaining.Round(time.Millisecond)),
		Granted: timestamppb.New(i.Granted), Owner: i.Owner, Revoking: i.Revoking,
	}
}

// classifyLease classifies the errors of leases and locks.
func classifyLease(err error) (fault, bool) {
	var metadata map[string]string
	if of, ok := errors.AsType[*lease.Error](err); ok {
		metadata = map[string]string{"lease": strconv.FormatUint(uint64(of.ID), 10)}
	}
	argument := func(field string) (fault, bool) {
		return fault{code: codes.InvalidArgument, reason: pb.ErrorReason_ERROR_REASON_INVALID_REQUEST, field: field}, true
	}
	switch {
	case errors.Is(err, lease.ErrNotFound):
		return fault{code: codes.NotFound, reason: pb.ErrorReason_ERROR_REASON_LEASE_NOT_FOUND, metadata: metadata}, true
	case errors.Is(err, lease.ErrRevoking):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_LEASE_REVOKING, metadata: metadata}, true
	case errors.Is(err, lease.ErrExists):
		return fault{code: codes.AlreadyExists, reason: pb.ErrorReason_ERROR_REASON_LEASE_EXISTS, metadata: metadata}, true
	case errors.Is(err, lease.ErrTooManyKeys):
		f := exhausted(pb.ErrorReason_ERROR_REASON_TOO_MANY_LEASE_KEYS, retryLoad)
		f.metadata = map[string]string{"lease": metadata["lease"], "limit": strconv.Itoa(lease.KeysMax)}
		return f, true
	case errors.Is(err, lease.ErrTooMany):
		return exhausted(pb.ErrorReason_ERROR_REASON_TOO_MANY_LEASES, retryLoad), true
	case errors.Is(err, lease.ErrWaiters):
		return exhausted(pb.ErrorReason_ERROR_REASON_TOO_MANY_WAITERS, retrySessions), true
	case errors.Is(err, lease.ErrUndone):
		return fault{code: codes.FailedPrecondition, reason: pb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED}, true
	case errors.Is(err, lease.ErrTTL):
		return argument("ttl")
	case errors.Is(err, lease.ErrOwner):
		return argument("owner")
	case errors.Is(err, lease.ErrLockName):
		return argument("name")
	case errors.Is(err, lease.ErrLockValue):
		return argument("value")
	}
	return fault{}, false
}

package server

import (
	"context"
	"fmt"
	"strings"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// endedHolders is how many holds, and holders of the log, the server's log has lines about.
type endedHolders struct {
	holds, log uint64
}

// logEnds logs what is not kept any more although its owner did not say so: its reader will miss something.
func (s *Server) logEnds() {
	e := &s.conditions.ended
	holds, total := s.store.EndedHolds(e.holds)
	for i := range holds {
		h := &holds[i]
		s.log.Info("a hold has ended at its deadline: its past is not kept any more", "id", h.ID, "owner", h.Owner, "epoch", uint64(h.Epoch))
	}
	if missed := total - e.holds - uint64(len(holds)); missed > 0 {
		s.log.Info("more holds have ended at their deadlines", "count", missed)
	}
	e.holds = total
	holders, total := s.store.EndedLogHolders(e.log)
	for i := range holders {
		h := &holders[i]
		s.log.Warn("the log is not kept any more for a reader", "name", h.Name, "owner", h.Owner, "cause", h.Why.Reason(), "epoch", uint64(h.From))
	}
	if missed := total - e.log - uint64(len(holders)); missed > 0 {
		s.log.Warn("the log is not kept any more for other readers", "count", missed)
	}
	e.log = total
}

// ListHolds implements Admin.
func (s *adminService) ListHolds(ctx context.Context, _ *pb.ListHoldsRequest) (*pb.ListHoldsResponse, error) {
	out := new(pb.ListHoldsResponse)
	return out, s.serveRead(ctx, telemetry.MethodListHolds, func() error {
		for _, h := range s.store.Holds() {
			out.Holds = append(out.Holds, holdMessage(&h))
		}
		return nil
	})
}

func holdMessage(h *mvcc.Hold) *pb.Hold {
	return &pb.Hold{Id: h.ID, Owner: h.Owner, Epoch: uint64(h.Epoch), DeadlineMs: h.Deadline}
}

// TakeHold implements Admin.
func (s *adminService) TakeHold(ctx context.Context, req *pb.TakeHoldRequest) (*pb.TakeHoldResponse, error) {
	out := new(pb.TakeHoldResponse)
	return out, s.serveAdmin(ctx, telemetry.MethodTakeHold, func() error {
		ttl := req.GetTtl().AsDuration()
		switch {
		case ttl < time.Second || ttl > mvcc.HoldTimeMax:
			return invalid("ttl", "must be between 1s and 720h")
		case len(req.GetOwner()) > mvcc.HoldOwnerMax:
			return invalid("owner", "may have 128 bytes")
		case strings.HasPrefix(req.GetOwner(), mvcc.ArchiveOwner):
			return invalid("owner", fmt.Sprintf("must not begin with %q, as those of the archive do", mvcc.ArchiveOwner))
		case req.GetId() != 0 && (req.GetOwner() != "" || req.GetEpoch() != 0 || req.GetTimeUs() != 0):
			return invalid("id", "must be 0 with an owner, an epoch or a time: these cannot be changed")
		}
		return s.changeHolds(ctx, func(x *mvcc.Session) error {
			h, err := s.takeHold(ctx, x, req, ttl)
			if err == nil {
				out.Hold = holdMessage(&h)
			}
			return err
		})
	})
}

func (s *adminService) takeHold(ctx context.Context, x *mvcc.Session, req *pb.TakeHoldRequest, ttl time.Duration) (mvcc.Hold, error) {
	if req.GetId() != 0 {
		return x.RenewHold(ctx, req.GetId(), ttl)
	}
	at, err := namedEpoch(ctx, x, req.GetEpoch(), req.GetTimeUs(), "time_us")
	if err != nil {
		return mvcc.Hold{}, err
	}
	h, err := x.TakeHold(ctx, req.GetOwner(), at, ttl)
	if err == nil {
		s.log.Info("a hold was taken: the past is kept from its epoch on", "id", h.ID, "owner", h.Owner, "epoch", uint64(h.Epoch), "for", ttl)
	}
	return h, err
}

// namedEpoch is an epoch that is given, or that of a time.
func namedEpoch(ctx context.Context, x *mvcc.Session, epoch, at uint64, field string) (keys.Epoch, error) {
	switch {
	case at == 0:
		return keys.Epoch(epoch), nil
	case epoch != 0:
		return 0, invalid(field, "must be 0 with an epoch")
	}
	return x.EpochAt(ctx, at)
}

// EndHold implements Admin.
func (s *adminService) EndHold(ctx context.Context, req *pb.EndHoldRequest) (*pb.EndHoldResponse, error) {
	return new(pb.EndHoldResponse), s.serveAdmin(ctx, telemetry.MethodEndHold, func() error {
		return s.changeHolds(ctx, func(x *mvcc.Session) error {
			h, err := x.EndHold(ctx, req.GetId())
			if err == nil {
				s.log.Info("a client ends a hold: its past is not kept any more", "id", h.ID, "owner", h.Owner, "epoch", uint64(h.Epoch))
			}
			return err
		})
	})
}

func (s *Server) changeHolds(ctx context.Context, change func(*mvcc.Session) error) error {
	if err := s.refusesWrites(); err != nil {
		return err
	}
	x, err := s.store.SessionOf(ctx)
	if err != nil {
		return err
	}
	defer x.Close()
	return change(x)
}

package server

import (
	"context"
	"time"

	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
)

// peerOf is the client's address, which identifies it.
func peerOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		return p.Addr.String()
	}
	return ""
}

// ListWatches implements Admin.
func (s *adminService) ListWatches(ctx context.Context, _ *pb.ListWatchesRequest) (*pb.ListWatchesResponse, error) {
	list := s.feed.feed.List()
	if err := s.checkAgain(ctx); err != nil { // it may have waited for its turn
		return nil, statusOf(err).Err()
	}
	access := accessOf(ctx)
	out := new(pb.ListWatchesResponse)
	for i := range list {
		w := &list[i]
		out.Watches = append(out.Watches, &pb.WatchInfo{
			Id: w.ID, Peer: w.Identity, Ranges: rangeMessages(w.Ranges, access), State: watchStates[w.State], Epoch: uint64(w.Position.Epoch), Lag: w.Lag,
			QueuedEvents: uint64(w.QueuedOperations), QueuedBytes: uint64(w.QueuedBytes),
			Age: durationpb.New(time.Since(w.Since)), Idle: durationpb.New(time.Since(w.Taken)),
		})
	}
	return out, nil
}

var watchStates = map[feed.State]pb.WatchInfo_State{
	feed.StateLive: pb.WatchInfo_STATE_LIVE, feed.StateLagging: pb.WatchInfo_STATE_LAGGING,
	feed.StateNeedsDifference: pb.WatchInfo_STATE_DIFFERENCE, feed.StateEnded: pb.WatchInfo_STATE_ENDED,
}

// rangeMessages are ranges of internal keys as their client knows them, if the caller may read them.
func rangeMessages(list []feed.Range, to *access) (out []*pb.KeyRange) {
	for _, r := range list {
		m := &pb.KeyRange{Start: keys.User(r.Lower)}
		if len(r.Upper) > 1 { // otherwise the end of the keyspace
			m.End = keys.User(r.Upper)
		}
		if !to.mayRead(m.Start, m.End) {
			continue
		}
		out = append(out, m)
	}
	return out
}

// EndWatch implements Admin.
func (s *adminService) EndWatch(_ context.Context, req *pb.EndWatchRequest) (*pb.EndWatchResponse, error) {
	if !s.feed.feed.End(req.Id, errWatchEnded) {
		return nil, statusOf(errNoSuchWatch).Err()
	}
	s.log.Info("an operator ends a watch", "id", req.Id)
	return new(pb.EndWatchResponse), nil
}

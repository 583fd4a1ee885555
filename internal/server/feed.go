package server

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/transport"
)

// feedService implements FeedService.
type feedService struct {
	pb.UnimplementedFeedServiceServer
	*Server
}

// feedState is the server's part of the change stream.
type feedState struct {
	feed    *feed.Feed
	changes *mvcc.Changes
	archive *archive.Archiver // nil without an archive; constant after Open

	looks       archiveLooks
	stopArchive context.CancelFunc // set by Run
	streams     atomic.Int64       // open ones
	watched     atomic.Bool        // the first one was opened
	gaps        watchGaps

	units        watchUnits
	responses    responseShare
	aheadTimeout time.Duration // constant, but for tests
	clients      watchClients

	expanding expanding
	delays    telemetry.Delays // from commits to Send
}

// watchGaps count what became of watches to which the log did not reach back.
type watchGaps struct {
	crossed atomic.Uint64 // differences that were sent to their end
	gone    atomic.Uint64 // watches that ended with HISTORY_GONE
}

func (f *feedState) init(s *mvcc.Store, c *config.Config) {
	f.changes, f.aheadTimeout, f.stopArchive = s.Changes(), watchAheadTimeout, func() {}
	f.feed = feed.New(f.changes, feed.Options{
		MemoryBytes: int64(c.Feed.Memory), CatchUpReaders: c.Feed.CatchUpReaders, CatchUpBytesPerSecond: int64(c.Feed.CatchUpBandwidth),
		SyncInterval: c.Feed.SyncInterval, WatchesMax: c.Feed.Watches, ConsumerWatchesMax: c.Feed.WatchesPerStream,
		RangesMax: watchRangesMax,
	})
}

// Bounds of watches that no option sets.
const (
	watchRangesMax = 64
	// watchEventsMax is the largest number of events in one response.
	watchEventsMax = 1000
	// watchResponseBytes is how large a response becomes, but for one event that is larger, which waits for room: see watchLine.
	// Further responses of a stream wait until its client has taken this one.
	watchResponseBytes = 256 << 10
	// watchResponsesBytes bounds the responses of all streams together: with many streams, they are smaller.
	watchResponsesBytes = int64(config.WatchResponseBytes)
	// watchResponseRest is what a response has beside its events.
	watchResponseRest = 128 + commitBytes
	// watchResponseBytesMin is the least that a response may have: see responseShare.
	watchResponseBytesMin = int64(16 << 10)

	progressIntervalDefault = 10 * time.Second
	progressIntervalMin     = 100 * time.Millisecond
	// drainSendTimeout is how long a stream that is being sent to may finish its response when the server stops.
	drainSendTimeout = time.Second
)

// stats is the change stream's part of the metrics.
func (f *feedState) stats(now uint64) telemetry.FeedStats {
	s := telemetry.FeedStats{Stats: f.feed.Stats(), Streams: f.streams.Load(), Delays: &f.delays, Watched: f.watched.Load()}
	s.GapsCrossed, s.GapsGone = f.gaps.crossed.Load(), f.gaps.gone.Load()
	if s.Lag > 0 && s.CommitTime > 0 {
		s.LagTime = time.Duration(max(now, s.CommitTime)-s.CommitTime) * time.Microsecond
	}
	return s
}

// conditions is the condition that the log is damaged where it was read for watches.
func (f *feedState) conditions() []health.Condition {
	err := f.feed.Stats().Damage
	if err == nil {
		return nil
	}
	return []health.Condition{{
		Name: "change-log-damaged", Severity: health.Warning,
		Message: "the log is damaged where it was read for watches; its commits are safe in the data file, and watches are sent the difference or end; distrust the device",
		Cause:   err.Error(),
	}}
}

var (
	errNoSuchWatch = errors.New("no watch has this id")
	errWatchEnded  = errors.New("an operator ended the watch; watch again with its last resume token")
)

// lineage is the name of the history for tokens. A store of the oldest feature level has only its own name.
func (s *Server) lineage() keys.Lineage {
	if l := s.store.History().Lineage; l != (keys.Lineage{}) {
		return l
	}
	return keys.Lineage(s.store.ID())
}

// Watch implements Feed.
func (s *feedService) Watch(stream grpc.BidiStreamingServer[pb.WatchRequest, pb.WatchResponse]) error {
	ctx := stream.Context()
	return s.serveStream(ctx, telemetry.MethodWatch, func(conn *connection) error {
		client := networkOf(ctx)
		leave, err := s.feed.enterStream(client, &s.config.Feed)
		if err != nil {
			return err
		}
		defer leave()
		w := &watchStream{
			server: s.Server, conn: conn, stream: stream, lineage: s.lineage(), requests: make(chan watchRequest),
			watches: map[uint64]*streamWatch{}, consumer: s.feed.feed.NewConsumer(peerOf(ctx)).Of(client),
			ahead: aheadWatches{arrived: make(chan error, 1)}, rights: watchRights{access: *s.newAccess(ctx)}, response: takenResponse{client: client},
		}
		s.feed.watched.Store(true)
		return w.run(ctx)
	})
}

// run serves the stream until it ends. A sender that is in Send while its client takes nothing comes out of it only when the
// handler returns.
func (w *watchStream) run(ctx context.Context) error {
	done := make(chan error, 1)
	w.server.drain.receivers.Go(func() { w.receive(ctx) })
	w.server.drain.receivers.Go(func() { done <- w.send(ctx) })
	stall := w.server.config.Feed.StallTimeout
	tick := time.NewTicker(max(min(stall/20, w.server.config.MessageTimeout/2), time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-w.server.drain.begun:
			select {
			case err := <-done:
				return err
			case <-time.After(drainSendTimeout):
				return errShuttingDown
			}
		case <-tick.C:
			if err := w.stalled(); err != nil {
				transport.LimitRest(ctx)
				return err
			}
		}
	}
}

// stalled is the error of a client that takes nothing for too long; or, while it has room for which others wait, too slowly, as for messages and
// answers that make no progress.
func (w *watchStream) stalled() error {
	now, since := w.server.clock.now(), w.sending.Load()
	if since == 0 {
		return nil
	}
	most, timeout := w.server.config.Feed.StallTimeout, w.server.config.MessageTimeout
	others := 0
	if w.turn.holds.Load() || w.turn.request.Load() {
		others = w.server.admission.watches.awaiting()
	}
	if others > 0 {
		most = min(most, timeout)
		longest := w.server.admission.slotTime / time.Duration(haste(others))
		if turn := w.turn.since.Load(); turn != 0 && now-time.Duration(turn) >= longest {
			return &watchStalledError{timeout: longest}
		}
	}
	if now-time.Duration(since) >= most {
		return &watchStalledError{timeout: most}
	}
	return nil
}

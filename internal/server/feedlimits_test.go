package server

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
)

// of receives the next response of one watch.
func (w *watcher) of(id uint64) *pb.WatchResponse {
	w.t.Helper()
	for {
		if r := w.recv(); r.WatchId == id && r.GetProgress() == nil {
			return r
		}
	}
}

// TestAWatchAheadOfTheServerWaitsForIt, after an epoch, a token, a token in the middle of a commit, and one of a snapshot,
// while the other watches of its stream go on. A watch that waits can be cancelled.
func TestAWatchAheadOfTheServerWaitsForIt(t *testing.T) {
	h := mustStart(t)
	e := h.put(t, "k", "v")
	if err := h.store.AwaitDurable(testContext(t), keys.Epoch(e)); err != nil { // a watch begins after what is durable
		t.Fatal(err)
	}
	all := []*pb.KeyRange{{}}
	ranges, _ := toWatchRanges(all)
	token := func(change func(*feedToken)) *pb.CreateWatch_ResumeToken {
		tk := feedToken{lineage: h.lineage(), filter: watchFilter(ranges, 0)}
		change(&tk)
		return &pb.CreateWatch_ResumeToken{ResumeToken: tk.encode()}
	}
	at := keys.Epoch(e)
	w := mustWatch(t, h,
		&pb.CreateWatch{WatchId: 1},
		&pb.CreateWatch{WatchId: 2, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e + 4}},
		&pb.CreateWatch{WatchId: 3, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: uint64(keys.MaxEpoch)}},
		&pb.CreateWatch{WatchId: 4, Start: token(func(t *feedToken) { t.position.Epoch = at + 2 })},
		&pb.CreateWatch{WatchId: 5, Start: token(func(t *feedToken) { t.position = feed.Position{Epoch: at + 2, Operations: 1} })},
		&pb.CreateWatch{WatchId: 6, Start: token(func(t *feedToken) { t.snapshot, t.last = at+3, []byte("a") })},
	)
	if r := w.recv(); r.WatchId != 1 || r.GetCreated() == nil {
		t.Fatalf("%v", r)
	}
	h.put(t, "k", "1")
	if r := w.recv(); r.WatchId != 1 || r.GetChanges() == nil {
		t.Fatalf("a watch began too early, or held up another: %v", r)
	}
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Cancel{Cancel: &pb.CancelWatch{WatchId: 3}}})
	if r := w.recv(); r.WatchId != 3 || r.GetEnded() == nil || r.GetEnded().Error != nil {
		t.Fatalf("%v", r)
	}
	for i, begin := range [][]uint64{{4}, {5, 6}, {2}} {
		h.put(t, "k", fmt.Sprint(i))
		for len(begin) > 0 {
			r := w.recv()
			if r.GetEnded() != nil {
				t.Fatalf("%v", r)
			}
			if r.GetCreated() == nil {
				continue
			}
			at := slices.Index(begin, r.WatchId)
			if at < 0 {
				t.Fatalf("instead of one of %v: %v", begin, r)
			}
			begin = slices.Delete(begin, at, at+1)
		}
	}
}

// TestAWatchThatIsAheadForTooLongEnds with a status to repeat it after, and nothing else of its stream does.
func TestAWatchThatIsAheadForTooLongEnds(t *testing.T) {
	h := mustStart(t)
	h.feed.aheadTimeout = 50 * time.Millisecond
	e := h.put(t, "k", "v")
	began := time.Now()
	w := mustWatch(t, h, &pb.CreateWatch{WatchId: 1}, &pb.CreateWatch{WatchId: 2, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e + 10}})
	ended := w.of(2).GetEnded()
	if took := time.Since(began); ended == nil || took < 50*time.Millisecond {
		t.Fatalf("%v after %v", ended, took)
	}
	f := failureOf(t, status.ErrorProto(ended.Error))
	f.want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_WATCH_AHEAD, "epoch", "visible")
	if f.retry == 0 {
		t.Errorf("no advice to retry: %+v", f)
	}
	h.put(t, "k", "w")
	if w.of(1).GetChanges() == nil {
		t.Error("the other watch has ended")
	}
}

// TestWatchesAreLimited: each limit admits exactly as much as it says, and what has ended makes room.
func TestWatchesAreLimited(t *testing.T) {
	const perServer, perStream = 5, 3
	h := mustStart(t, func(c *config.Config) {
		c.Feed.Watches, c.Feed.WatchesPerStream = 2*perServer, perStream // of which one client gets half
	})
	all := []*pb.KeyRange{{}}
	create := func(w *watcher, id uint64, ranges []*pb.KeyRange) *pb.WatchResponse {
		w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: id, Ranges: ranges}}})
		return w.of(id)
	}
	refused := func(what string, r *pb.WatchResponse, limit string) {
		t.Helper()
		if r.GetEnded() == nil {
			t.Fatalf("%s: %v", what, r)
		}
		f := failureOf(t, status.ErrorProto(r.GetEnded().GetError()))
		if f.want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_WATCHES, "limit"); f.metadata["limit"] != limit {
			t.Errorf("%s: %+v", what, f)
		}
	}
	w, other := mustWatch(t, h), mustWatch(t, h)
	for id := range uint64(perStream) {
		if create(w, id, all).GetCreated() == nil {
			t.Fatalf("watch %d of a stream was refused", id)
		}
	}
	refused("a stream", create(w, 9, all), "3")
	for id := range uint64(perServer - perStream) {
		if create(other, id, all).GetCreated() == nil {
			t.Fatalf("watch %d of the server was refused", perStream+id)
		}
	}
	refused("the server", create(other, 9, all), "5")
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Cancel{Cancel: &pb.CancelWatch{WatchId: 0}}})
	w.of(0)
	var ranges []*pb.KeyRange
	for i := range watchRangesMax + 1 {
		ranges = append(ranges, &pb.KeyRange{Start: fmt.Appendf(nil, "%03d", i), End: fmt.Appendf(nil, "%03da", i)})
	}
	if r := create(w, 9, ranges); failureOf(t, status.ErrorProto(r.GetEnded().GetError())).field != "create.ranges" {
		t.Errorf("%d ranges: %v", len(ranges), r)
	}
	refused("ranges that count as several watches", create(w, 9, ranges[:watchRangesMax]), "10")
}

// TestAWatchOfManyRangesCountsAsSeveral: what the bounds of ranges take is within the bound of memory, and is counted while the
// watch is open, whether it has begun or waits.
func TestAWatchOfManyRangesCountsAsSeveral(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Feed.Watches = 100 })
	var ranges []*pb.KeyRange
	for i := range watchRangesMax {
		ranges = append(ranges, &pb.KeyRange{Start: fmt.Appendf(nil, "%0500d", i), End: fmt.Appendf(nil, "%0500da", i)})
	}
	create := &pb.CreateWatch{WatchId: 1, Ranges: ranges[:2], Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: 1 << 40}}
	w := mustWatch(t, h, create, &pb.CreateWatch{WatchId: 2, Ranges: ranges})
	if r := w.of(2); failureOf(t, status.ErrorProto(r.GetEnded().GetError())).metadata["limit"] != "100" {
		t.Fatalf("%v", r)
	}
	if units := h.feed.units.used.Load(); units < 5 {
		t.Errorf("a watch that waits counts as %d", units)
	}
	few := &pb.CreateWatch{WatchId: 3}
	for i := range watchRangesMax {
		few.Ranges = append(few.Ranges, &pb.KeyRange{Start: fmt.Appendf(nil, "%02d", i), End: fmt.Appendf(nil, "%02da", i)})
	}
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: few}})
	if r := w.of(3); r.GetCreated() == nil {
		t.Errorf("%d short ranges: %v", watchRangesMax, r)
	}
	w.cancel()
	eventually(t, "nothing is counted", func() bool { return h.feed.units.used.Load() == 0 })
}

// TestStreamsOfWatchesOfOneClientAreLimited, however many connections it has.
func TestStreamsOfWatchesOfOneClientAreLimited(t *testing.T) {
	const streams = 3
	h := mustStart(t, func(c *config.Config) { c.Feed.StreamsPerClient = streams })
	var open []*watcher
	for range streams {
		w := mustWatch(t, h, &pb.CreateWatch{})
		w.recv()
		open = append(open, w)
	}
	one, err := pb.NewFeedServiceClient(h.dial(t)).Watch(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	_, err = one.Recv()
	f := failureOf(t, err)
	if f.want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_WATCHES, "limit"); f.metadata["limit"] != "3" {
		t.Errorf("%+v", f)
	}
	open[0].cancel()
	eventually(t, "the stream has ended", func() bool { return h.Server.feed.streams.Load() < streams })
	mustWatch(t, h, &pb.CreateWatch{}).recv()
}

package server

import (
	"context"
	"fmt"
	"io"
	"math"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
)

// watcher is a client of one stream of watches.
type watcher struct {
	t      testing.TB
	stream grpc.BidiStreamingClient[pb.WatchRequest, pb.WatchResponse]
	cancel context.CancelFunc
}

func mustWatch(t testing.TB, h *harness, create ...*pb.CreateWatch) *watcher {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	stream, err := pb.NewFeedServiceClient(h.conn).Watch(ctx)
	if err != nil {
		t.Fatal(err)
	}
	w := &watcher{t, stream, cancel}
	for _, c := range create {
		if len(c.Ranges) == 0 {
			c.Ranges = []*pb.KeyRange{{}}
		}
		w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: c}})
	}
	return w
}

func (w *watcher) send(r *pb.WatchRequest) {
	w.t.Helper()
	if err := w.stream.Send(r); err != nil {
		w.t.Fatal(err)
	}
}

func (w *watcher) recv() *pb.WatchResponse {
	w.t.Helper()
	r, err := w.stream.Recv()
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// ended receives the end of a watch and returns its error.
func (w *watcher) ended() error {
	w.t.Helper()
	for {
		if e := w.recv().GetEnded(); e != nil {
			return status.ErrorProto(e.Error)
		}
	}
}

// events receives until there are so many events, as "epoch kind key value".
func (w *watcher) events(n int) (all []string, token []byte) {
	w.t.Helper()
	for len(all) < n {
		r := w.recv()
		for _, c := range r.GetChanges().GetCommits() {
			for _, e := range c.Events {
				all = append(all, fmt.Sprintf("%d %c %s %s", c.Epoch, e.Kind.String()[len("EVENT_KIND_")], e.Key, e.Value))
			}
		}
		if r.GetEnded() != nil {
			w.t.Fatalf("ended: %v", r.GetEnded().Error)
		}
		token = r.ResumeToken
	}
	return all, token
}

func mustEqualLists(t testing.TB, got []string, want ...string) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Fatalf("got\n%q, want\n%q", got, want)
	}
}

// TestWatchDeliversCommitsInOrderAndResumes: through both transports, each commit in the ranges comes once, as a whole, and a
// token continues exactly after what came with it.
func TestWatchDeliversCommitsInOrderAndResumes(t *testing.T) {
	h := mustStart(t)
	e := h.put(t, "a/before", "0")
	w := mustWatch(t, h, &pb.CreateWatch{
		WatchId: 7, Ranges: []*pb.KeyRange{{Prefix: []byte("a/")}, {Prefix: []byte("c/")}}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e},
	})
	if c := w.recv(); c.GetCreated() == nil || c.WatchId != 7 || c.GetCreated().AfterEpoch != e || len(c.ResumeToken) != 40 {
		t.Fatalf("%v", c)
	}
	first := h.put(t, "a/1", "one")
	h.put(t, "b/1", "not watched")
	out, err := h.kv.BatchWrite(testContext(t), &pb.BatchWriteRequest{Mutations: []*pb.Mutation{
		{Kind: pb.Mutation_KIND_DELETE, Key: []byte("a/1")}, {Kind: pb.Mutation_KIND_PUT, Key: []byte("b/2")}, {Kind: pb.Mutation_KIND_PUT, Value: []byte("see"), Key: []byte("c/1")},
	}})
	if err != nil {
		t.Fatal(err)
	}
	got, token := w.events(3)
	mustEqualLists(t, got, fmt.Sprintf("%d S a/1 one", first), fmt.Sprintf("%d D a/1 ", out.Epoch), fmt.Sprintf("%d S c/1 see", out.Epoch))
	w.cancel()
	last := h.put(t, "c/2", "more")
	again := mustWatch(t, h, &pb.CreateWatch{
		Ranges: []*pb.KeyRange{{Prefix: []byte("c/")}, {Prefix: []byte("a/")}}, Start: &pb.CreateWatch_ResumeToken{ResumeToken: token},
	})
	got, _ = again.events(1)
	mustEqualLists(t, got, fmt.Sprintf("%d S c/2 more", last))
	again.send(&pb.WatchRequest{Request: &pb.WatchRequest_Cancel{Cancel: &pb.CancelWatch{}}})
	if err := again.ended(); err != nil {
		t.Fatal(err)
	}
}

// TestWatchBeginsAfterATime with the first commit that is later, whether versions of the past are kept or not.
func TestWatchBeginsAfterATime(t *testing.T) {
	h := mustStart(t)
	start := clockAfter(t, h)
	h.put(t, "k", "before")
	at := clockAfter(t, h)
	first := h.put(t, "k", "after")
	h.put(t, "k", "more")
	w := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterTimeUs{AfterTimeUs: at}})
	if c := w.recv().GetCreated(); c.GetAfterEpoch() != first-1 {
		t.Errorf("the watch begins after epoch %d, want %d", c.GetAfterEpoch(), first-1)
	}
	got, _ := w.events(2)
	mustEqualLists(t, got, fmt.Sprintf("%d S k after", first), fmt.Sprintf("%d S k more", first+1))
	all := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterTimeUs{AfterTimeUs: start}})
	if c := all.recv().GetCreated(); c.GetAfterEpoch() >= first-1 {
		t.Errorf("the watch of all begins after epoch %d", c.GetAfterEpoch())
	}
	future := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterTimeUs{AfterTimeUs: at + uint64(time.Hour.Microseconds())}})
	if f := failureOf(t, future.ended()); f.reason != pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE.Reason() {
		t.Errorf("%+v", f)
	}
}

// TestWatchPromisesProgress after everything before it was sent: when the client asks, and after the interval.
func TestWatchPromisesProgress(t *testing.T) {
	h := mustStart(t)
	w := mustWatch(t, h, &pb.CreateWatch{Ranges: []*pb.KeyRange{{Prefix: []byte("a")}}, ProgressInterval: durationpb.New(progressIntervalMin)})
	w.recv()
	e := h.put(t, "b", "elsewhere")
	for {
		r := w.recv()
		if r.GetProgress().GetEpoch() >= e && len(r.ResumeToken) == 40 {
			break
		}
	}
	quiet := mustWatch(t, h, &pb.CreateWatch{})
	quiet.recv()
	quiet.send(&pb.WatchRequest{Request: &pb.WatchRequest_Progress{Progress: &pb.RequestProgress{}}})
	if p := quiet.recv().GetProgress(); p.GetEpoch() < e {
		t.Fatalf("progress %v; want at least %d", p, e)
	}
}

// TestWatchShowsPreviousValues, that of a key that did not exist among them.
func TestWatchShowsPreviousValues(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Retention = time.Minute })
	e := h.put(t, "k", "1")
	h.put(t, "k", "2")
	if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("k")}); err != nil {
		t.Fatal(err)
	}
	h.put(t, "k", "3")
	for range 2 { // the second reads what the first has left at the commits
		w := mustWatch(t, h, &pb.CreateWatch{Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}})
		var got []string
		for len(got) < 4 {
			for _, c := range w.recv().GetChanges().GetCommits() {
				for _, e := range c.Events {
					got = append(got, fmt.Sprintf("%s>%s %v %v", e.PreviousValue, e.Value, e.PreviousValue != nil, e.PreviousUnavailable))
				}
			}
		}
		mustEqualLists(t, got, ">1 false false", "1>2 true false", "2> true false", ">3 false false")
	}
}

// TestWatchRefusesWhatItCannotPromise: each wrong request ends its watch with the reason, and the stream goes on.
func TestWatchRefusesWhatItCannotPromise(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Feed.WatchesPerStream = 2 })
	h.feed.aheadTimeout = time.Millisecond
	e := h.put(t, "k", "v")
	if err := h.feed.feed.Await(testContext(t), keys.Epoch(e)); err != nil {
		t.Fatal(err)
	}
	all := []*pb.KeyRange{{}}
	token := func(change func(*feedToken)) *pb.CreateWatch_ResumeToken {
		tk := feedToken{lineage: h.lineage()}
		tk.position.Epoch = keys.Epoch(e)
		ranges, _ := toWatchRanges(all)
		tk.filter = watchFilter(ranges, 0)
		change(&tk)
		return &pb.CreateWatch_ResumeToken{ResumeToken: tk.encode()}
	}
	w := mustWatch(t, h)
	for _, c := range []struct {
		create *pb.CreateWatch
		want   pb.ErrorReason
	}{
		{&pb.CreateWatch{}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: make([]*pb.KeyRange, 65)}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: []*pb.KeyRange{{Start: []byte("b"), End: []byte("a")}}}, pb.ErrorReason_ERROR_REASON_INVALID_RANGE},
		{&pb.CreateWatch{Ranges: []*pb.KeyRange{{Start: []byte("a"), End: []byte("a")}}}, pb.ErrorReason_ERROR_REASON_INVALID_RANGE},
		{&pb.CreateWatch{Ranges: all, Kinds: []pb.EventKind{9}}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: all, Origins: []pb.CommitOrigin{0}}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: all, Values: 9}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: all, OnGap: 9}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: all, ProgressInterval: durationpb.New(1)}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: all, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e + 1000}}, pb.ErrorReason_ERROR_REASON_WATCH_AHEAD},
		{&pb.CreateWatch{Ranges: all, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: uint64(keys.MaxEpoch) + 1}}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: all, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: math.MaxUint64}}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: all, Start: token(func(t *feedToken) { t.position = feed.Position{Epoch: keys.MaxEpoch, Operations: 1} })}, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN},
		{&pb.CreateWatch{Ranges: all, Start: &pb.CreateWatch_AfterTimeUs{}}, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.CreateWatch{Ranges: all, Start: &pb.CreateWatch_ResumeToken{}}, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN},
		{&pb.CreateWatch{Ranges: all, Start: token(func(t *feedToken) { t.filter++ })}, pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN},
		{&pb.CreateWatch{Ranges: all, Start: token(func(t *feedToken) { t.lineage[0]++ })}, pb.ErrorReason_ERROR_REASON_LINEAGE_CHANGED},
	} {
		w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: c.create}})
		if f := failureOf(t, w.ended()); f.reason != c.want.Reason() {
			t.Errorf("%v: %+v, want %v", c.create, f, c.want.Reason())
		}
	}
	for id := range uint64(3) {
		w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: id, Ranges: all, Start: token(func(*feedToken) {})}}})
		if id < 2 && w.recv().GetCreated() == nil {
			t.Fatalf("watch %d was not created", id)
		}
	}
	if f := failureOf(t, w.ended()); f.reason != pb.ErrorReason_ERROR_REASON_TOO_MANY_WATCHES.Reason() || f.metadata["limit"] != "2" {
		t.Errorf("%+v", f)
	}
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: 1, Ranges: all}}})
	if _, err := w.stream.Recv(); failureOf(t, err).field != "create.watch_id" {
		t.Errorf("an id that is in use: %v", err)
	}
}

// TestDrainEndsWatchesWithAStatusToResumeAfter, also one whose client takes nothing.
func TestDrainEndsWatchesWithAStatusToResumeAfter(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.DrainTimeout = 300 * time.Millisecond }) // for the stream that is not read
	w, stalled := mustWatch(t, h, &pb.CreateWatch{}), mustWatch(t, h, &pb.CreateWatch{})
	w.recv()
	stalled.recv()
	for range 20 {
		h.put(t, "k", string(make([]byte, 100<<10)))
	}
	w.events(20)
	go func() { _ = h.stop() }()
	for {
		if _, err := w.stream.Recv(); err != nil {
			if f := failureOf(t, err); f.reason != pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN.Reason() {
				t.Errorf("%+v", f)
			}
			break
		}
	}
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
}

// TestLoadedEventsStayInTheWatchedRanges: a bulk load is an event of each watched range that it meets, with the keys of both.
func TestLoadedEventsStayInTheWatchedRanges(t *testing.T) {
	h := mustStart(t)
	w := mustWatch(t, h, &pb.CreateWatch{Ranges: []*pb.KeyRange{
		{End: []byte("a")}, {End: []byte("key-00002"), Start: []byte("b")}, {Prefix: []byte("key-00005")}, {Start: []byte("key-00008")},
	}})
	w.recv()
	if _, err := h.bulk(t, 10, 1, true); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range w.recv().GetChanges().GetCommits()[0].Events {
		got = append(got, fmt.Sprintf("%v %s-%q", e.Kind, e.Key, e.EndKey))
	}
	mustEqualLists(t, got, `EVENT_KIND_LOADED key-00000-"key-00002"`, `EVENT_KIND_LOADED key-00005-"key-00006"`, `EVENT_KIND_LOADED key-00008-"key-00009\x00"`)
}

// TestStalledWatchEnds after --watch-stall-timeout, and delays no other.
func TestStalledWatchEnds(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Feed.StallTimeout = 300 * time.Millisecond })
	stalled, other := mustWatch(t, h, &pb.CreateWatch{}), mustWatch(t, h, &pb.CreateWatch{})
	stalled.recv()
	other.recv()
	for i := range 40 {
		h.put(t, fmt.Sprint(i), string(make([]byte, 100<<10)))
		other.events(1)
	}
	for h.Server.feed.streams.Load() > 1 {
		time.Sleep(time.Millisecond)
	}
	for {
		_, err := stalled.stream.Recv()
		if err == io.EOF {
			t.Fatal("the stream ended without an error")
		}
		if err != nil {
			if f := failureOf(t, err); f.reason != pb.ErrorReason_ERROR_REASON_WATCH_STALLED.Reason() || f.metadata["timeout"] != "300ms" {
				t.Fatalf("%+v", f)
			}
			return
		}
	}
}

// TestNoEventComesAfterProgressAtItsEpoch, while progress is requested all the time between writes.
func TestNoEventComesAfterProgressAtItsEpoch(t *testing.T) {
	h := mustStart(t)
	w := mustWatch(t, h, &pb.CreateWatch{})
	w.recv()
	kv := pb.NewKVServiceClient(h.dial(t)) // its own connection: that of the watch is full of progress
	ctx, cancel := context.WithCancel(testContext(t))
	var working sync.WaitGroup
	defer working.Wait()
	defer w.cancel() // of a Send that waits
	defer cancel()
	asked := make(chan struct{}, 64) // more at once would leave a single processor no time for the puts
	working.Go(func() {
		for ctx.Err() == nil {
			select {
			case asked <- struct{}{}:
				_ = w.stream.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Progress{Progress: &pb.RequestProgress{}}})
			case <-ctx.Done():
			}
		}
	})
	for range 4 {
		working.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				_, _ = kv.Put(ctx, &pb.PutRequest{Key: fmt.Append(nil, i%10)})
			}
		})
	}
	promised, promises, commits := uint64(0), 0, 0
	for promises < 200 || commits < 500 {
		r := w.recv()
		if p := r.GetProgress(); p != nil {
			promised, promises = max(promised, p.Epoch), promises+1
			select {
			case <-asked:
			default:
			}
		}
		for _, c := range r.GetChanges().GetCommits() {
			if commits++; c.Epoch <= promised {
				t.Fatalf("commit %d came after progress at %d", c.Epoch, promised)
			}
		}
	}
}

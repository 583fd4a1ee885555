package server

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
)

// replica is the state that a watch leads to.
type replica struct {
	state map[string]string
	epoch uint64 // of the newest commit
}

// mustReachTheStore applies responses up to a last commit, and compares the replica with the store.
func (r *replica) mustReachTheStore(t testing.TB, h *harness, w *watcher) {
	t.Helper()
	last := h.put(t, "z", "last")
	for r.epoch < last {
		r.apply(t, w.recv())
	}
	if want := h.contents(t); !maps.Equal(r.state, want) {
		t.Fatalf("the watch leads to %d keys, the store has %d", len(r.state), len(want))
	}
}

// apply applies a response, and reports whether a snapshot or difference has ended with it.
func (r *replica) apply(t testing.TB, m *pb.WatchResponse) (walked bool) {
	t.Helper()
	if m.GetEnded() != nil {
		t.Fatalf("ended: %v", m.GetEnded().Error)
	}
	for _, e := range m.GetSnapshot().GetEntries() {
		r.state[string(e.Key)] = string(e.Value)
	}
	r.events(m.GetDifference().GetEvents())
	for _, c := range m.GetChanges().GetCommits() {
		if c.Epoch < r.epoch {
			t.Fatalf("commit %d after %d", c.Epoch, r.epoch)
		}
		r.epoch = c.Epoch
		r.events(c.Events)
	}
	if m.GetSnapshot().GetEnd() || m.GetDifference().GetEnd() {
		r.epoch = max(m.GetSnapshot().GetEpoch(), m.GetDifference().GetEpoch())
		return true
	}
	return false
}

func (r *replica) events(list []*pb.ChangeEvent) {
	for _, e := range list {
		if e.Kind == pb.EventKind_EVENT_KIND_DELETE {
			delete(r.state, string(e.Key))
		} else {
			r.state[string(e.Key)] = string(e.Value)
		}
	}
}

// contents reads everything.
func (h *harness) contents(t testing.TB) map[string]string {
	t.Helper()
	stream, err := h.kv.Scan(testContext(t), &pb.ScanRequest{})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for {
		page, err := stream.Recv()
		if err != nil {
			return all
		}
		for _, e := range page.Entries {
			all[string(e.Key)] = string(e.Value)
		}
	}
}

// TestSnapshotThenWatchMissesNothing: writers work while the snapshot is sent in many parts; the client's state is that of the
// store in the end. The snapshot is resumed in the middle, on another stream.
func TestSnapshotThenWatchMissesNothing(t *testing.T) {
	h := mustStart(t)
	for i := range 40 {
		var batch pb.BatchWriteRequest
		for j := range 100 {
			batch.Mutations = append(batch.Mutations, &pb.Mutation{
				Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%02d%02d", i, j), Value: bytes.Repeat([]byte{'v'}, 300),
			})
		}
		if _, err := h.kv.BatchWrite(testContext(t), &batch); err != nil {
			t.Fatal(err)
		}
	}
	ctx, stop := context.WithCancel(testContext(t))
	var writing sync.WaitGroup
	writing.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			key := fmt.Appendf(nil, "k%02d%02d", i*7%40, i*11%100)
			if i%3 == 0 {
				_, _ = h.kv.Delete(context.WithoutCancel(ctx), &pb.DeleteRequest{Key: key})
			} else {
				_, _ = h.kv.Put(context.WithoutCancel(ctx), &pb.PutRequest{Key: key, Value: fmt.Append(nil, i)})
			}
		}
	})
	r := &replica{state: map[string]string{}}
	w := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}})
	var token []byte
	for parts := 0; parts < 2; {
		m := w.recv()
		r.apply(t, m)
		if m.GetSnapshot() != nil {
			token = m.ResumeToken
			parts++
		}
	}
	again := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_ResumeToken{ResumeToken: token}})
	for !r.apply(t, again.recv()) {
	}
	w.cancel()
	stop()
	writing.Wait()
	r.mustReachTheStore(t, h, again)
}

// TestDifferenceCrossesWhatTheLogHasNot: a watch that begins before the log does ends with HISTORY_GONE, or is sent the
// difference and goes on after it.
func TestDifferenceCrossesWhatTheLogHasNot(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Retention, c.Feed.Retention = time.Minute, 0 })
	r := &replica{state: map[string]string{"gone": "v", "stays": "v"}}
	h.put(t, "gone", "v")
	begin := h.put(t, "stays", "v")
	for i := range 300 {
		h.put(t, fmt.Sprint(i%10), string(make([]byte, 10_000)))
	}
	if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("gone")}); err != nil {
		t.Fatal(err)
	}
	for h.Server.feed.feed.Oldest() <= 1 {
		if _, err := h.admin.Checkpoint(testContext(t), new(pb.CheckpointRequest)); err != nil {
			t.Fatal(err)
		}
		h.put(t, "more", string(make([]byte, 100_000)))
	}
	fails := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: begin}})
	if f := failureOf(t, fails.ended()); f.reason != pb.ErrorReason_ERROR_REASON_HISTORY_GONE.Reason() || f.metadata["epoch"] != fmt.Sprint(begin) {
		t.Errorf("%+v", f)
	}
	early := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterTimeUs{AfterTimeUs: 1}})
	if f := failureOf(t, early.ended()); f.reason != pb.ErrorReason_ERROR_REASON_HISTORY_GONE.Reason() || f.metadata["time_us"] != "1" || f.metadata["oldest"] == "" {
		t.Errorf("%+v", f)
	}
	w := mustWatch(t, h, &pb.CreateWatch{OnGap: pb.OnGap_ON_GAP_DIFF, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: begin}})
	for !r.apply(t, w.recv()) {
	}
	r.mustReachTheStore(t, h, w)
	_, text := httpGet(t, h, "/metrics")
	for _, want := range []string{`kvserver_feed_gaps_total{result="diff"} 1`, `kvserver_feed_gaps_total{result="gone"} 2`} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is not in the metrics", want)
		}
	}
}

// TestADifferenceFromTheBeginningGoesOnAsOne: its tokens have no epoch, as those of a snapshot. A client that wants no snapshot would not
// look at the parts of one.
func TestADifferenceFromTheBeginningGoesOnAsOne(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Feed.Retention = 0 })
	for i := range 60 {
		h.put(t, fmt.Sprint(i), string(make([]byte, 10_000)))
	}
	for h.Server.feed.feed.Oldest() <= 1 {
		if _, err := h.admin.Checkpoint(testContext(t), new(pb.CheckpointRequest)); err != nil {
			t.Fatal(err)
		}
		h.put(t, "more", string(make([]byte, 100_000)))
	}
	r := &replica{state: map[string]string{}}
	start := &pb.CreateWatch{OnGap: pb.OnGap_ON_GAP_DIFF, Start: &pb.CreateWatch_AfterEpoch{}}
	for streams := 1; ; streams++ {
		w := mustWatch(t, h, start)
		m := w.recv()
		for m.GetDifference() == nil {
			if m.GetSnapshot() != nil {
				t.Fatal("a part of a snapshot")
			}
			m = w.recv()
		}
		if r.apply(t, m) {
			if streams < 3 {
				t.Errorf("%d parts", streams)
			}
			r.mustReachTheStore(t, h, w)
			break
		}
		w.cancel()
		start = &pb.CreateWatch{OnGap: pb.OnGap_ON_GAP_DIFF, Start: &pb.CreateWatch_ResumeToken{ResumeToken: m.ResumeToken}}
	}
	for _, l := range h.store.SnapshotLeases() {
		if l.Epoch == 0 {
			t.Errorf("%+v keeps an epoch before the first", l)
		}
	}
}

// TestOperatorListsAndEndsWatches.
func TestOperatorListsAndEndsWatches(t *testing.T) {
	h := mustStart(t)
	w := mustWatch(t, h, &pb.CreateWatch{Ranges: []*pb.KeyRange{{Prefix: []byte("a")}, {Start: []byte("x")}}})
	w.recv()
	list, err := h.admin.ListWatches(testContext(t), new(pb.ListWatchesRequest))
	if err != nil || len(list.Watches) != 1 {
		t.Fatalf("%v, %v", list, err)
	}
	one := list.Watches[0]
	if fmt.Sprintf("%q", one.Ranges[0].End) != `"b"` || string(one.Ranges[1].Start) != "x" || len(one.Ranges[1].End) != 0 || one.Peer == "" {
		t.Errorf("%v", one)
	}
	if _, err := h.admin.EndWatch(testContext(t), &pb.EndWatchRequest{Id: one.Id}); err != nil {
		t.Fatal(err)
	}
	if f := failureOf(t, w.ended()); f.reason != pb.ErrorReason_ERROR_REASON_WATCH_ENDED.Reason() {
		t.Errorf("%+v", f)
	}
	if _, err := h.admin.EndWatch(testContext(t), &pb.EndWatchRequest{Id: one.Id}); status.Code(err) != codes.NotFound {
		t.Errorf("a watch that has ended: %v", err)
	}
}

// TestLargeCommitsAndValuesAreDivided: a commit of more than a response comes in parts, each with a token that continues inside
// of it, and a value larger than a response comes whole.
func TestLargeCommitsAndValuesAreDivided(t *testing.T) {
	h := mustStart(t)
	var batch pb.BatchWriteRequest
	for i := range 2500 {
		batch.Mutations = append(batch.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%04d", i), Value: []byte("v")})
	}
	batch.Mutations[1200].Value = make([]byte, 2<<20)
	out, err := h.kv.BatchWrite(testContext(t), &batch)
	if err != nil {
		t.Fatal(err)
	}
	start := &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: out.Epoch - 1}}
	var got []string
	for parts := 0; ; {
		w := mustWatch(t, h, start)
		m := w.recv()
		for m.GetChanges() == nil {
			m = w.recv()
		}
		w.cancel()
		c := m.GetChanges().Commits[0]
		for _, e := range c.Events {
			got = append(got, string(e.Key))
		}
		if parts++; c.End {
			if parts < 3 {
				t.Errorf("%d parts", parts)
			}
			break
		}
		start = &pb.CreateWatch{Start: &pb.CreateWatch_ResumeToken{ResumeToken: m.ResumeToken}}
	}
	if len(got) != len(batch.Mutations) {
		t.Fatalf("%d events; want %d", len(got), len(batch.Mutations))
	}
	for i, key := range got {
		if key != string(batch.Mutations[i].Key) {
			t.Fatalf("event %d is of %s", i, key)
		}
	}
}

// TestFeedIsInTheMetrics: watches, events and the delay of their delivery.
func TestFeedIsInTheMetrics(t *testing.T) {
	h := mustStart(t)
	w := mustWatch(t, h, &pb.CreateWatch{})
	w.recv()
	h.put(t, "k", "v")
	w.events(1)
	_, text := httpGet(t, h, "/metrics")
	for _, want := range []string{
		`kvserver_feed_watches{state="live"} 1`, `kvserver_feed_events_total 1`, `kvserver_feed_delivery_delay_seconds_count 1`, `kvserver_feed_streams 1`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is not in the metrics", want)
		}
	}
}

// TestADifferenceThatWaitsForRoomKeepsItsBegin: a part with a large value waits until there is room, and its
// range is opened again. Meanwhile nothing else keeps the state before the difference.
func TestADifferenceThatWaitsForRoomKeepsItsBegin(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Retention, c.Feed.Retention = 0, 0 })
	const size = 1 << 20
	r := &replica{state: map[string]string{"gone": "v"}}
	begin := h.put(t, "gone", "v")
	h.store.LeaseSnapshot(keys.Epoch(begin), "", 3*time.Second)
	leased := time.Now()
	if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("gone")}); err != nil {
		t.Fatal(err)
	}
	h.put(t, "large", string(make([]byte, size)))
	for h.Server.feed.feed.Oldest() <= 1 {
		if _, err := h.admin.Checkpoint(testContext(t), new(pb.CheckpointRequest)); err != nil {
			t.Fatal(err)
		}
		h.put(t, "more", string(make([]byte, 100_000)))
	}
	held := h.fillWatches()
	w := mustWatch(t, h, &pb.CreateWatch{OnGap: pb.OnGap_ON_GAP_DIFF, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: begin}})
	w.recv()
	time.Sleep(time.Until(leased.Add(3500 * time.Millisecond)))
	for i := range 3 {
		h.put(t, "more", fmt.Sprint(i))
		if _, err := h.admin.Checkpoint(testContext(t), new(pb.CheckpointRequest)); err != nil {
			t.Fatal(err)
		}
	}
	held.leave()
	for !r.apply(t, w.recv()) {
	}
	r.mustReachTheStore(t, h, w)
}

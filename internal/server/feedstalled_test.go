package server

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// deafWindow is the window of the streams of dialDeaf.
const deafWindow = 64 << 10

// TestStalledWatchesHoldOneResponseEach: while a client takes nothing, its stream takes one response from the feed, and the server
// holds nothing else for it than that and the feed's own memory, which is bounded for all of them together. When the client comes
// back, nothing is missing.
func TestStalledWatchesHoldOneResponseEach(t *testing.T) {
	const streams, commits, perCommit, valueBytes, feedMemory = 48, 160, 25, 1000, 4 << 20
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Transport, c.Feed.Memory = transport, feedMemory })
			deaf := h.dialDeaf(t)
			var all []*watcher
			for range streams {
				stream, err := pb.NewFeedServiceClient(deaf).Watch(testContext(t))
				if err != nil {
					t.Fatal(err)
				}
				w := &watcher{t: t, stream: stream}
				w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}}}})
				w.recv()
				all = append(all, w)
			}
			before := liveHeap()
			for i := range commits {
				var b pb.BatchWriteRequest
				for k := range perCommit {
					b.Mutations = append(b.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%03d", k), Value: value(i, valueBytes)})
				}
				if _, err := h.kv.BatchWrite(testContext(t), &b); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "all streams have sent what their windows take", func() bool { return h.feed.feed.Stats().Events*valueBytes >= streams*deafWindow })
			time.Sleep(100 * time.Millisecond) // for what must not be taken
			// What the window has taken, and up to one response after it. Half as much again is for the first response of some, which was short.
			if most, got := uint64(streams*(deafWindow+watchResponseBytes)), h.feed.feed.Stats().Events*valueBytes; got > most+most/2 {
				t.Errorf("the streams took %d KiB from the feed, want at most %d KiB", got>>10, most>>10)
			}
			// Beside the server's, the heap has the windows of the clients, and the log in the simulated disk: what was written, what is synced, and their spare.
			const disk = 3 * commits * perCommit * valueBytes
			if most, got := int64(feedMemory+streams*(2*watchResponseBytes+2*deafWindow)+disk), liveHeap()-before; got > most {
				t.Errorf("%d streams hold %d KiB, want at most %d KiB", streams, got>>10, most>>10)
			}
			for _, w := range all[:2] {
				last := -1
				for n := 0; n < commits*perCommit; {
					for _, c := range w.recv().GetChanges().GetCommits() {
						for _, e := range c.Events {
							if i := n / perCommit; !bytes.Equal(e.Value, value(i, valueBytes)) {
								t.Fatalf("event %d is not of commit %d", n, i)
							}
							n++
						}
						last = max(last, int(c.Epoch))
					}
				}
			}
		})
	}
}

func value(i, size int) []byte { return bytes.Repeat([]byte{byte(i)}, size) }

// TestResponsesOfChangesAreUsedAgain: a response is the message that it says, and refers to nothing once it is encoded.
func TestResponsesOfChangesAreUsedAgain(t *testing.T) {
	sw, commit := &streamWatch{}, &feed.Commit{Epoch: 7, Time: 3_000_004}
	for _, events := range []int{1, 3, watchEventsMax, 2} {
		r := newChangesResponse()
		want := &pb.ChangedCommit{
			Epoch: 7, Time: &timestamppb.Timestamp{Seconds: 3, Nanos: 4000}, Origin: pb.CommitOrigin_COMMIT_ORIGIN_CLIENT, Lagging: true,
		}
		r.begin(commit, true)
		for i := range events {
			op := batch.Op{Kind: keys.KindSet, Key: keys.Append(nil, keys.SpaceUser, fmt.Appendf(nil, "k%d", i)), Value: []byte("v")}
			if !r.fits(100, 1<<20) {
				t.Fatalf("event %d does not fit", i)
			}
			describeEvent(r.add(100, feed.Position{}), sw, op, previousValue{})
			want.Events = append(want.Events, &pb.ChangeEvent{Kind: pb.EventKind_EVENT_KIND_SET, Key: fmt.Appendf(nil, "k%d", i), Value: []byte("v")})
		}
		if events == watchEventsMax && r.fits(0, 1<<20) {
			t.Errorf("there is room for more than %d events", watchEventsMax)
		}
		r.changes.Commits, r.body.Changes, r.Body, r.WatchId = r.commitsTo[:r.begun], &r.changes, &r.body, 5
		got := make([]byte, r.SizeVT())
		if _, err := r.MarshalToSizedBufferVT(got); err != nil {
			t.Fatal(err)
		}
		back := &pb.WatchResponse{}
		if err := proto.Unmarshal(got, back); err != nil {
			t.Fatal(err)
		}
		if full := (&pb.WatchResponse{WatchId: 5, Body: &pb.WatchResponse_Changes{Changes: &pb.WatchChanges{Commits: []*pb.ChangedCommit{want}}}}); !proto.Equal(back, full) {
			t.Fatalf("%d events: got\n%v, want\n%v", events, back, full)
		}
		if r.events != 0 || r.begun != 0 || r.Body != nil || r.all[0].Key != nil || r.all[events-1].Value != nil || r.commits[0].Events != nil {
			t.Errorf("%d events: the response refers to what it had", events)
		}
	}
}

// TestResponsesFitTheirBuffers: what a response counts is at least what it takes, so that no buffer is twice as large as it need be.
func TestResponsesFitTheirBuffers(t *testing.T) {
	h := mustStart(t)
	for _, size := range []int{0, 10, 100, 1000} {
		e := h.put(t, "first", "")
		var b pb.BatchWriteRequest
		for i := range 2 * watchResponseBytes / (size + 40) {
			b.Mutations = append(b.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%06d", i), Value: make([]byte, size)})
		}
		if _, err := h.kv.BatchWrite(testContext(t), &b); err != nil {
			t.Fatal(err)
		}
		w := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e}})
		w.recv()
		largest := 0
		for end := false; !end; {
			r := w.recv()
			largest = max(largest, r.SizeVT())
			for _, c := range r.GetChanges().GetCommits() {
				end = c.End
			}
		}
		w.cancel()
		if largest+grpcPrefixBytes > watchResponseBytes {
			t.Errorf("values of %d bytes: a response takes %d bytes", size, largest)
		}
	}
}

package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// takenWatches is room of which others have all.
type takenWatches []*watchRoom

// fillWatches takes the whole share of watches, and the place beside it.
func (h *harness) fillWatches() takenWatches {
	l, half := &h.admission.watches, int(h.admission.words[shareWatches].limit.bytes)/2
	rooms := takenWatches{l.join(new(connection), 4*half, nil)}
	for left := half; left >= countedBytesMin; left /= 2 {
		rooms = append(rooms, l.join(new(connection), left, nil))
	}
	return rooms
}

func (t takenWatches) leave() {
	for _, r := range t {
		r.leave()
	}
}

// TestAWaitForRoomEnds with its watch, with the right to it, with the token of the caller, with the server, and with the stream; and
// other requests of the stream are executed meanwhile.
func TestAWaitForRoomEnds(t *testing.T) {
	const size = 3 << 20
	end := func(out *pb.WatchResponse, err error) (codes.Code, bool) {
		if err != nil {
			return status.Code(err), true
		}
		return status.FromProto(out.GetEnded().GetError()).Code(), out.GetEnded() != nil && out.WatchId == 1
	}
	after := func(c *pb.CreateWatch, e uint64) { c.Start = &pb.CreateWatch_AfterEpoch{AfterEpoch: e} }
	starts := map[string]func(*pb.CreateWatch, uint64){
		"changes":    after,
		"lost queue": after, // there is room, and the watch waits for the log
		"snapshot":   func(c *pb.CreateWatch, _ uint64) { c.Start = &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}} },
		"previous": func(c *pb.CreateWatch, e uint64) {
			c.Start = &pb.CreateWatch_AfterEpoch{AfterEpoch: e + 1}
			c.Values = pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS
		},
	}
	ends := map[string]struct {
		end  func(h *harness, w *watcher)
		code codes.Code
	}{
		"cancelled": {func(_ *harness, w *watcher) {
			w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Cancel{Cancel: &pb.CancelWatch{WatchId: 1}}})
		}, codes.OK},
		"no right": {func(h *harness, _ *watcher) { h.setUsers(only(grant("r", "b"))) }, codes.PermissionDenied},
		"expired":  {func(*harness, *watcher) {}, codes.Unauthenticated},
		"operator": {func(h *harness, _ *watcher) {
			for _, one := range h.feed.feed.List() {
				h.feed.feed.End(one.ID, errWatchEnded)
			}
		}, codes.Aborted},
		"server":  {func(h *harness, _ *watcher) { go func() { _ = h.stop() }() }, codes.Unavailable},
		"context": {func(_ *harness, w *watcher) { w.cancel() }, codes.Canceled},
	}
	if testseed.RaceDetector == 1 {
		delete(starts, "lost queue")
		delete(starts, "snapshot")
	}
	for what, start := range starts {
		for why, e := range ends {
			if what == "snapshot" && why == "operator" {
				continue // the feed does not know the watch yet
			}
			test := func(t *testing.T, lifetime time.Duration) error {
				h := mustStartUnchecked(t, vfs.NewMem(), func(c *config.Config) {
					c.Retention, c.Feed.Memory, c.Feed.CatchUpReaders, c.Feed.CatchUpBandwidth = time.Minute, config.MiB, 1, config.MiB
				})
				first := h.put(t, "a", string(make([]byte, size)))
				if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("a")}); err != nil {
					t.Fatal(err)
				}
				if what == "snapshot" {
					h.put(t, "a", string(make([]byte, size)))
				}
				users := only(grant("r", "a"))
				h.setUsers(users)
				late := func() bool { return false }
				if why == "expired" {
					table := makeTable(users)
					expires := time.Now().Add(lifetime)
					addToken(table, "alice", expires)
					late = func() bool { return time.Now().After(expires) }
					h.gate.publish(table)
				}
				held := h.fillWatches()
				defer held.leave()
				ctx, cancel := context.WithCancel(as(testContext(t), "alice"))
				defer cancel()
				stream, err := pb.NewFeedServiceClient(h.conn).Watch(ctx)
				if err != nil {
					t.Fatal(err)
				}
				w := &watcher{t, stream, cancel}
				create := &pb.CreateWatch{WatchId: 1, Ranges: []*pb.KeyRange{prefixRange("a")}}
				start(create, first-1)
				w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}})
				eventually(t, "the stream waits for room", func() bool { return late() || h.admission.watches.isAwaited() })
				if what == "lost queue" {
					if _, err := h.kv.Put(as(testContext(t), "root"), &pb.PutRequest{Key: []byte("b"), Value: make([]byte, size)}); err != nil {
						t.Fatal(err)
					}
					eventually(t, "the watch has no queue", func() bool {
						watches := h.feed.feed.List()
						return late() || watches[0].QueuedOperations == 0
					})
					held.leave()
					eventually(t, "the stream has room", func() bool { return !h.admission.watches.isAwaited() })
				}
				if late() {
					return errors.New("the token has expired before the stream waits")
				}
				e.end(h, w)
				code, ended, began := codes.OK, false, time.Now()
				for !ended {
					out, err := stream.Recv()
					if out.GetChanges() != nil || len(out.GetSnapshot().GetEntries()) > 0 {
						t.Fatal("the large value has come")
					}
					code, ended = end(out, err)
				}
				if took := time.Since(began); took > progressIntervalDefault/2 {
					t.Errorf("ended after %v", took)
				}
				if code != e.code {
					t.Errorf("ended with %v, want %v", code, e.code)
				}
				eventually(t, "the stream has left the line", func() bool { return !h.admission.watches.isAwaited() })
				return nil
			}
			t.Run(what+" "+why, func(t *testing.T) {
				inTimeOf(t, 500*time.Millisecond, func(lifetime time.Duration) error { return test(t, lifetime) })
			})
		}
	}
}

// TestAWaitForRoomKeepsOtherRequestsOfTheStreamGoing: watches begin and end, and others of the stream have progress.
func TestAWaitForRoomKeepsOtherRequestsOfTheStreamGoing(t *testing.T) {
	h := mustStart(t)
	const size = 3 << 20
	e := h.put(t, "a", string(make([]byte, size)))
	held := h.fillWatches()
	w := mustWatch(t, h, &pb.CreateWatch{WatchId: 1, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}})
	w.recv()
	eventually(t, "the stream waits for room", h.admission.watches.isAwaited)
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: 2, Ranges: []*pb.KeyRange{prefixRange("b")}}}})
	if m := w.recv(); m.WatchId != 2 || m.GetCreated() == nil {
		t.Fatal(m)
	}
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Progress{Progress: &pb.RequestProgress{}}})
	if m := w.recv(); m.WatchId != 2 || m.GetProgress() == nil {
		t.Fatal(m)
	}
	held.leave()
	if m := w.recv(); m.WatchId != 1 || len(m.GetChanges().GetCommits()[0].Events[0].Value) != size {
		t.Fatal("the operation has not come")
	}
}

// TestAWaitForRoomMakesNoProgress: a change that waits for room for its previous value was taken from the feed and is not sent yet.
// Progress must not promise it.
func TestAWaitForRoomMakesNoProgress(t *testing.T) {
	h := mustStartUnchecked(t, vfs.NewMem(), func(c *config.Config) { c.Retention = time.Minute })
	large := h.put(t, "a", string(make([]byte, 3<<20)))
	held := h.fillWatches()
	w := mustWatch(t, h, &pb.CreateWatch{
		WatchId: 1, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: large}, Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS,
	})
	w.recv()
	e := h.put(t, "a", "small")
	eventually(t, "the stream waits for room", h.admission.watches.isAwaited)
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Progress{Progress: &pb.RequestProgress{}}})
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{WatchId: 2, Ranges: []*pb.KeyRange{prefixRange("b")}}}})
	for m := w.recv(); m.WatchId != 2; m = w.recv() { // the request before it was executed
		t.Errorf("watch 1 got %T before the change at %d", m.Body, e)
	}
	held.leave()
	for _, want := range []func(*pb.WatchResponse) bool{
		func(m *pb.WatchResponse) bool { return m.GetChanges().GetCommits()[0].GetEpoch() == e },
		func(m *pb.WatchResponse) bool { return m.GetProgress().GetEpoch() >= e }, // for which the client has asked
	} {
		m := w.recv()
		for m.WatchId != 1 {
			m = w.recv()
		}
		if !want(m) {
			t.Fatalf("watch 1 got %T", m.Body)
		}
	}
}

// TestLargeChangesAreNotOvertakenByReads: answers that use up their share, or follow one another in it without end, take nothing from
// the changes.
func TestLargeChangesAreNotOvertakenByReads(t *testing.T) {
	h := mustStart(t)
	const size = 3 << 20
	e := h.put(t, "a", string(make([]byte, size)))
	full, err := h.admission.charge(new(connection), int(h.admission.words[shareAnswers].limit.bytes), false)
	if err != nil {
		t.Fatal(err)
	}
	defer full.release()
	w := mustWatch(t, h, &pb.CreateWatch{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}})
	w.recv()
	if got := w.recv().GetChanges().GetCommits(); len(got) != 1 || len(got[0].Events[0].Value) != size {
		t.Fatal("the operation has not come")
	}
}

// TestManyStreamsTakeNoLargeValuesUncounted: with many streams a response is small, and a value that is larger waits for room.
func TestManyStreamsTakeNoLargeValuesUncounted(t *testing.T) {
	h := mustStart(t)
	e := h.put(t, "a", string(make([]byte, 100<<10)))
	defer h.feed.responses.useUp()()
	held := h.fillWatches()
	for _, start := range []*pb.CreateWatch{
		{Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}}, {Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}},
	} {
		w := mustWatch(t, h, start)
		w.recv()
		eventually(t, "the stream waits for room", h.admission.watches.isAwaited)
		w.cancel()
		eventually(t, "the stream has left the line", func() bool { return !h.admission.watches.isAwaited() })
	}
	held.leave()
}

// TestALargeChangeIsCountedUntilItIsSent, by both transports: that of the gRPC library sends after SendMsg has returned.
func TestALargeChangeIsCountedUntilItIsSent(t *testing.T) {
	const size = 3 << 20
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		t.Run(string(transport), func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) { c.Transport = transport })
			e := h.put(t, "a", string(make([]byte, size)))
			stream, err := pb.NewFeedServiceClient(h.dialDeaf(t)).Watch(testContext(t))
			if err != nil {
				t.Fatal(err)
			}
			w := &watcher{t: t, stream: stream}
			w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}}}})
			counted := func() int64 {
				_, _, answers := h.admission.inflight()
				return answers
			}
			eventually(t, "the change is counted", func() bool { return counted() >= size && h.feed.feed.Stats().Events == 1 })
			time.Sleep(50 * time.Millisecond) // for what must not happen
			if counted() < size {
				t.Error("the change is not counted although its client takes nothing")
			}
		})
	}
}

// TestAClientThatTakesNothingKeepsNoOtherWaiting for longer than it may leave an answer unread.
func TestAClientThatTakesNothingKeepsNoOtherWaiting(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.MessageTimeout = time.Second })
	size := int(h.admission.words[shareWatches].limit.bytes) - 1<<20
	e := h.put(t, "a", string(make([]byte, size)))
	deaf, err := pb.NewFeedServiceClient(h.dialDeaf(t)).Watch(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	create := &pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}}}}
	if err := deaf.Send(create); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it has the share", func() bool { return h.feed.feed.Stats().Events == 1 })
	time.Sleep(1500 * time.Millisecond) // alone it may do so for --watch-stall-timeout
	if n := h.feed.streams.Load(); n != 1 {
		t.Fatalf("%d streams", n)
	}
	w := mustWatch(t, h, create.GetCreate())
	w.recv()
	ended := make(chan error, 1)
	go func() { // within another second after the end, when its stream is reset
		for h.feed.streams.Load() == 2 {
			time.Sleep(time.Millisecond)
		}
		var err error
		for err == nil {
			_, err = deaf.Recv()
		}
		ended <- err
	}()
	if got := w.recv().GetChanges().GetCommits(); len(got) != 1 || len(got[0].Events[0].Value) != size {
		t.Fatal("the operation has not come")
	}
	failureOf(t, <-ended).want(t, codes.Aborted, pb.ErrorReason_ERROR_REASON_WATCH_STALLED, "timeout")
}

// TestAStalledWatchKeepsNoPreviousValues: each of many small commits has replaced a value that is not small. Responses wait for the
// client without those of other responses.
func TestAStalledWatchKeepsNoPreviousValues(t *testing.T) {
	testseed.SkipUnderRace(t)
	const values, size, feedMemory = 300, 100 << 10, 1 << 20
	h := mustStart(t, func(c *config.Config) { c.Retention, c.Feed.Memory = time.Minute, feedMemory })
	measured := make(chan struct{})
	defer close(measured)
	h.disk.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpWrite && strings.HasSuffix(name, ".ekv") {
			<-measured // no merge ends: the data file is in the heap, too
		}
	})
	for i := range values {
		h.put(t, fmt.Sprintf("k%03d", i), string(make([]byte, size)))
	}
	before := h.store.Visible()
	for i := range values {
		if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: fmt.Appendf(nil, "k%03d", i)}); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the deletions are stable", func() bool { return h.feed.feed.Stable() == h.store.Visible() })
	create := &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}, Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: uint64(before)}}
	deaf, err := pb.NewFeedServiceClient(h.dialDeaf(t)).Watch(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	heap := liveHeap()
	if err := deaf.Send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: create}}); err != nil {
		t.Fatal(err)
	}
	var out *pb.WatchResponse
	for got := 0; got < values*3/4; { // the rest of the delivery waits
		if out, err = deaf.Recv(); err != nil {
			t.Fatal(err)
		}
		for _, c := range out.GetChanges().GetCommits() {
			for _, e := range c.Events {
				if got++; len(e.PreviousValue) != size || e.PreviousUnavailable {
					t.Fatalf("%d bytes before %s", len(e.PreviousValue), e.Key)
				}
			}
		}
	}
	time.Sleep(100 * time.Millisecond)
	if grown, most := liveHeap()-heap, int64(feedMemory+4*watchResponseBytes+2*deafWindow); grown > most {
		t.Errorf("a stalled watch holds %d KiB, want at most %d KiB", grown>>10, most>>10)
	}
}

// TestDamageBeforeAChangeEndsItsWatchOnly: what the key was cannot be read. What comes before it is sent, and the other watches of the
// stream go on.
func TestDamageBeforeAChangeEndsItsWatchOnly(t *testing.T) {
	h := mustStartDamaged(t, func(c *config.Config) { c.Retention = time.Minute }) // else what was before may be gone when it is read
	lost := ""
	for i := 0; lost == ""; i++ {
		key := fmt.Sprintf("key-%05d", i)
		if _, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte(key)}); err != nil {
			lost = key
		}
	}
	e := h.put(t, "key-", "sound")
	h.put(t, lost, "new")
	w := mustWatch(t, h,
		&pb.CreateWatch{WatchId: 1, Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}},
		&pb.CreateWatch{WatchId: 2, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: e - 1}})
	sound := false
	for out := w.of(1); ; out = w.of(1) {
		for _, c := range out.GetChanges().GetCommits() {
			sound = sound || string(c.Events[0].Key) == "key-"
			if string(c.Events[0].Key) == lost {
				t.Fatalf("the watch goes on: %v", c.Events[0])
			}
		}
		if out.GetEnded() != nil {
			failureOf(t, status.ErrorProto(out.GetEnded().Error)).want(t, codes.DataLoss, pb.ErrorReason_ERROR_REASON_CORRUPTION, h.damageFields()...)
			break
		}
	}
	if !sound {
		t.Error("the change before it has not come")
	}
	h.put(t, "last", "v")
	for last := ""; last != "last"; {
		for _, c := range w.of(2).GetChanges().GetCommits() {
			last = string(c.Events[0].Key)
		}
	}
}

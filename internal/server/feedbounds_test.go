package server

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
)

// TestAStreamHasFewWalksAtATime: the snapshots with which the watches of one stream begin do not take the sessions of all clients.
func TestAStreamHasFewWalksAtATime(t *testing.T) {
	h := mustStart(t)
	const values, watches = 8, 16
	for i := range values {
		h.put(t, fmt.Sprint("k", i), string(make([]byte, 256<<10)))
	}
	var list []*pb.CreateWatch
	for i := range watches {
		list = append(list, &pb.CreateWatch{WatchId: uint64(i), Start: &pb.CreateWatch_Snapshot{Snapshot: &pb.WatchSnapshot{}}})
	}
	before, _ := h.store.Sessions()
	w := mustWatch(t, h, list...)
	w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Cancel{Cancel: &pb.CancelWatch{WatchId: watches - 1}}}) // it may not have begun
	most, entries := 0, map[uint64]int{}
	for ended := 0; ended < watches; {
		m := w.recv()
		open, _ := h.store.Sessions()
		most = max(most, open-before)
		entries[m.WatchId] += len(m.GetSnapshot().GetEntries())
		if m.GetEnded() != nil && m.WatchId != watches-1 {
			t.Fatalf("watch %d: %v", m.WatchId, m.GetEnded())
		}
		if m.GetSnapshot().GetEnd() && m.WatchId != watches-1 || m.GetEnded() != nil {
			ended++
		}
	}
	if most > watchWalksMax+2 {
		t.Errorf("%d sessions for the watches of one stream", most)
	}
	for i := range uint64(watches - 1) {
		if entries[i] != values {
			t.Errorf("watch %d has got %d entries of %d", i, entries[i], values)
		}
	}
	h.put(t, "k", "after all snapshots")
	for got := 0; got < watches-1; {
		if w.recv().GetChanges() != nil {
			got++
		}
	}
}

// TestABusyWatchDoesNotWithholdProgressOfOthers of its stream: their resume tokens would become too old.
func TestABusyWatchDoesNotWithholdProgressOfOthers(t *testing.T) {
	h := mustStart(t)
	const commits = 40
	for i := range commits {
		h.put(t, fmt.Sprint("b", i), string(make([]byte, 200<<10)))
	}
	w := mustWatch(t, h,
		&pb.CreateWatch{WatchId: 1, Ranges: []*pb.KeyRange{{Prefix: []byte("a")}}, ProgressInterval: durationpb.New(progressIntervalMin)},
		&pb.CreateWatch{WatchId: 2, Ranges: []*pb.KeyRange{{Prefix: []byte("b")}}, Start: &pb.CreateWatch_AfterEpoch{}})
	events, progress := 0, 0
	for events < commits {
		m := w.recv()
		for _, c := range m.GetChanges().GetCommits() {
			events += len(c.Events)
		}
		if m.GetProgress() != nil && m.WatchId == 1 {
			progress++
		}
		time.Sleep(progressIntervalMin / 8)
	}
	if progress == 0 {
		t.Errorf("no progress of the idle watch beside %d commits of the other", commits)
	}
}

// TestPreviousValuesOfACommitAreReadWithinABound: a commit that deletes large values is small, and what was before it is not.
func TestPreviousValuesOfACommitAreReadWithinABound(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Retention = time.Minute })
	const values, size = 12, 50 << 10
	var deletion pb.BatchWriteRequest
	for i := range values {
		key := fmt.Sprintf("k%02d", i)
		h.put(t, key, string(make([]byte, size)))
		deletion.Mutations = append(deletion.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_DELETE, Key: []byte(key)})
	}
	out, err := h.kv.BatchWrite(testContext(t), &deletion)
	if err != nil {
		t.Fatal(err)
	}
	var list [][]byte
	for _, m := range deletion.Mutations {
		list = append(list, m.Key)
	}
	ws, read := &watchStream{server: h.Server}, make([]*previousValue, values)
	defer ws.giveResponse()
	for i := range read {
		read[i] = &previousValue{unread: true}
	}
	if _, err := ws.readPrevious(testContext(t), keys.Epoch(out.Epoch-1), list, read); err != nil {
		t.Fatal(err)
	}
	kept := 0
	for _, v := range read {
		kept += len(v.value)
	}
	if kept > watchResponseBytes || kept < size {
		t.Errorf("%d bytes of previous values, want %d to %d", kept, size, watchResponseBytes)
	}
	w := mustWatch(t, h, &pb.CreateWatch{Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: out.Epoch - 1}})
	for got := 0; got < values; {
		for _, c := range w.recv().GetChanges().GetCommits() {
			for _, e := range c.Events {
				if len(e.PreviousValue) != size {
					t.Fatalf("the previous value of %s has %d bytes", e.Key, len(e.PreviousValue))
				}
				got++
			}
		}
	}
}

// TestPreviousValuesTakeNoMemoryForWhatIsNotWanted: of a large commit, a watch may want the first and the last operation.
func TestPreviousValuesTakeNoMemoryForWhatIsNotWanted(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Retention = time.Minute })
	c := h.feed.feed.NewConsumer("client")
	defer c.Close()
	h.put(t, "k9999", "before")
	if err := h.feed.feed.Await(testContext(t), h.store.Visible()); err != nil {
		t.Fatal(err)
	}
	ranges := []feed.Range{{Lower: []byte("k0000"), Upper: []byte("k0000\x00")}, {Lower: []byte("k9999"), Upper: []byte("k9999\x00")}}
	if _, err := c.Watch(feed.WatchOptions{Now: true, Ranges: ranges}); err != nil {
		t.Fatal(err)
	}
	var large pb.BatchWriteRequest
	for i := range 10_000 {
		large.Mutations = append(large.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%04d", i)})
	}
	if _, err := h.kv.BatchWrite(testContext(t), &large); err != nil {
		t.Fatal(err)
	}
	<-c.Wake()
	d, ok := c.Next(feed.Limit{})
	if !ok || len(d.Parts) != 1 {
		t.Fatalf("%+v", d)
	}
	ws := &watchStream{server: h.Server}
	defer ws.giveResponse()
	read, err := ws.previousOf(testContext(t), &d.Parts[0], 0)
	if err != nil {
		t.Fatal(err)
	}
	if first, last := read.of(0), read.of(9999); first.found || first.unread || string(last.value) != "before" || cap(read.values) != 2 {
		t.Errorf("before the operations were %+v and %+v; there is room for %d", first, last, cap(read.values))
	}
}

// TestALargePreviousValueIsChargedWithItsValue: a stream that has no memory for a large value and what it has replaced takes neither.
func TestALargePreviousValueIsChargedWithItsValue(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Retention, c.Limits.InflightBytes = time.Minute, 64*config.MiB })
	const size = 3 << 19
	h.put(t, "k", string(make([]byte, size)))
	first := h.get(t, "k").Epoch
	h.put(t, "k", string(make([]byte, size)))
	l := &h.admission.watches // room for one of the two values is left in the share
	held := takenWatches{l.join(new(connection), 16<<20, nil), l.join(new(connection), 512<<10, nil)}
	w := mustWatch(t, h, &pb.CreateWatch{Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: first}})
	eventually(t, "the stream waits for room", h.admission.watches.isAwaited)
	if n := h.feed.feed.Stats().Events; n != 0 {
		t.Errorf("%d operations were taken without room for what they have replaced", n)
	}
	held.leave()
	for got := 0; got == 0; {
		for _, c := range w.recv().GetChanges().GetCommits() {
			for _, e := range c.Events {
				if got++; len(e.Value) != size || len(e.PreviousValue) != size {
					t.Errorf("%d bytes, before %d", len(e.Value), len(e.PreviousValue))
				}
			}
		}
	}
}

// TestALargePreviousValueIsReadWhenThereIsMemory: the deletion of a large value is small, and what was before it is not.
func TestALargePreviousValueIsReadWhenThereIsMemory(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Retention = time.Minute })
	const size = 3 << 20
	h.put(t, "k", string(make([]byte, size)))
	at := h.get(t, "k").Epoch
	if _, err := h.admin.Checkpoint(testContext(t), new(pb.CheckpointRequest)); err != nil { // in the tree it is copied to be read
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	ws, read := &watchStream{server: h.Server}, &previousValue{unread: true}
	defer ws.giveResponse()
	if _, err := ws.readPrevious(testContext(t), keys.Epoch(at), [][]byte{[]byte("k")}, []*previousValue{read}); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	if allocated := after.TotalAlloc - before.TotalAlloc; !read.unread || read.value != nil || allocated > size {
		t.Errorf("%d bytes were read, and %d allocated", len(read.value), allocated)
	}
}

// TestPreviousValuesOfEverySizeCome: those of one commit that are shared, read for one response, and read alone.
func TestPreviousValuesOfEverySizeCome(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Retention = time.Minute })
	sizes := []int{10, 200 << 10, 10, 3 << 20, 100 << 10, 100 << 10, 0, 70 << 10, 300 << 10, 60 << 10}
	for i := range 100 {
		sizes = append(sizes, i*i*3)
	}
	var deletion pb.BatchWriteRequest
	for i, size := range sizes {
		key := fmt.Sprintf("k%03d", i)
		h.put(t, key, string(make([]byte, size)))
		deletion.Mutations = append(deletion.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_DELETE, Key: []byte(key)})
	}
	out, err := h.kv.BatchWrite(testContext(t), &deletion)
	if err != nil {
		t.Fatal(err)
	}
	for _, create := range []*pb.CreateWatch{{}, {Ranges: []*pb.KeyRange{{Start: []byte("k001"), End: []byte("k005")}, {Start: []byte("k007")}}}} {
		create.Values, create.Start = pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS, &pb.CreateWatch_AfterEpoch{AfterEpoch: out.Epoch - 1}
		w := mustWatch(t, h, create)
		var got []string
		for end := false; !end; {
			for _, c := range w.recv().GetChanges().GetCommits() {
				for _, e := range c.Events {
					got = append(got, fmt.Sprintf("%s %d", e.Key, len(e.PreviousValue)))
				}
				end = c.End
			}
		}
		var want []string
		for i, size := range sizes {
			if len(create.Ranges) < 2 || i >= 1 && i < 5 || i >= 7 {
				want = append(want, fmt.Sprintf("k%03d %d", i, size))
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("got  %v\nwant %v", got, want)
		}
		w.cancel()
	}
}

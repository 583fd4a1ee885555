package server

import (
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestAWatchThatEndsWhileOneBeforeItBeginsIsNotBegun: both wait for their epochs. While the first begins, the stream may wait for room, and execute requests
// meanwhile, or find that the client has lost its right to the second.
func TestAWatchThatEndsWhileOneBeforeItBeginsIsNotBegun(t *testing.T) {
	h := mustStart(t)
	ctx := t.Context()
	first, second := &streamWatch{id: 1}, &streamWatch{id: 2}
	w := &watchStream{
		server: h.Server, conn: new(connection), watches: map[uint64]*streamWatch{1: first, 2: second}, lineage: h.lineage(),
		consumer: h.feed.feed.NewConsumer("test").Of("test"), ahead: aheadWatches{arrived: make(chan error, 1)},
	}
	defer w.consumer.Close()
	var got []*pb.WatchResponse
	w.stream = &encodingWatch{ctx: ctx, look: func(encoded []byte) {
		m := new(pb.WatchResponse)
		if err := m.UnmarshalVT(encoded); err != nil {
			t.Error(err)
		}
		if got = append(got, m); len(got) == 1 {
			if err := w.end(ctx, second, nil); err != nil {
				t.Error(err)
			}
		}
	}}
	for _, sw := range []*streamWatch{first, second} {
		_, err := w.toWatchOptions(&pb.CreateWatch{Ranges: []*pb.KeyRange{prefixRange("k")}}, &sw.options)
		if err != nil {
			t.Fatal(err)
		}
		w.ahead.list = append(w.ahead.list, aheadWatch{watch: sw, start: watchStart{now: true}, deadline: time.Now().Add(time.Minute)})
	}
	if err := w.beginArrived(ctx, nil); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].WatchId != 1 || got[0].GetCreated() == nil || got[1].WatchId != 2 || got[1].GetEnded() == nil {
		t.Errorf("the client has got %v", got)
	}
	if second.watch != nil {
		t.Error("a watch was begun that had ended")
	}
}

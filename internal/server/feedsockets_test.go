package server

import (
	"flag"
	"fmt"
	"runtime"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

var deafSockets = flag.Int("watch.sockets", 50, "clients of TestStalledSocketsLeaveNothing")

// TestStalledSocketsLeaveNothing: clients of watches that take nothing, each over a socket of its own with a window of 64 KiB,
// hold up no writer and no other watch, and when they are gone, so is what they held: goroutines, streams and memory are as
// before. For more: -watch.sockets=1000
func TestStalledSocketsLeaveNothing(t *testing.T) {
	const feedMemory, valueBytes, batches, perBatch = 4 << 20, 4 << 10, 80, 25
	h := mustStart(t, func(c *config.Config) {
		c.Feed.Memory, c.Limits.Connections, c.Feed.StreamsPerClient = feedMemory, *deafSockets+16, *deafSockets+1
		c.Memory = max(c.Memory, config.Size(*deafSockets)*2*config.MiB)
	})
	write := func(batches int) {
		for i := range batches {
			var b pb.BatchWriteRequest
			for k := range perBatch {
				b.Mutations = append(b.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%03d", k), Value: value(i, valueBytes)})
			}
			if _, err := h.kv.BatchWrite(testContext(t), &b); err != nil {
				t.Fatal(err)
			}
		}
	}
	live := mustWatch(t, h, &pb.CreateWatch{Values: pb.WatchValues_WATCH_VALUES_NONE})
	live.recv()
	write(batches) // what the store takes is there before
	live.events(batches * perBatch)
	goroutines, heap := runtime.NumGoroutine(), liveHeap()
	var conns []*grpc.ClientConn
	for range *deafSockets {
		conn := h.dialDeaf(t)
		stream, err := pb.NewFeedServiceClient(conn).Watch(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		w := &watcher{t: t, stream: stream}
		w.send(&pb.WatchRequest{Request: &pb.WatchRequest_Create{Create: &pb.CreateWatch{Ranges: []*pb.KeyRange{{}}}}})
		w.recv()
		conns = append(conns, conn)
	}
	write(batches)
	live.events(batches * perBatch)
	eventually(t, "the watches lag", func() bool { return h.feed.feed.Stats().Lagging >= *deafSockets })
	held := liveHeap() - heap
	for _, conn := range conns {
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "their streams have ended", func() bool { return h.feed.streams.Load() == 1 })
	// Workers of the server come and go with requests; what stays with a stream would be there for each of them.
	eventually(t, "their goroutines have ended", func() bool { return runtime.NumGoroutine() <= goroutines+*deafSockets/5 })
	// What is left: a ring of commits for the watch that goes on, and the windows of the test's own clients. A response for each
	// stream alone would be more.
	after := int64(0)
	eventually(t, "their memory is free", func() bool { after = liveHeap() - heap; return after <= feedMemory+held*2/5 })
	t.Logf("%d KiB of memory are left of %d KiB", after>>10, held>>10)
	if units := h.feed.units.used.Load(); units != 1 {
		t.Errorf("%d watches are counted, want 1", units)
	}
	write(1)
	live.events(perBatch)
}

package server

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// openPipeline opens a pipeline that has executed a request, and stays open.
func openPipeline(t *testing.T, conn *grpc.ClientConn) error {
	t.Helper()
	stream, err := pb.NewKVServiceClient(conn).Pipeline(testContext(t))
	if err == nil {
		_ = stream.Send(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Get{Get: &pb.GetRequest{Key: []byte("k")}}})
		_, err = stream.Recv()
	}
	return err
}

// TestConnectionsOfOneClientLeaveStreamsToOthers: each of them leaves as many as it has, and several would leave none.
func TestConnectionsOfOneClientLeaveStreamsToOthers(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		const shared = 64
		limit := h.receiving.streams.limit
		h.receiving.streams.reserved.Add(limit - shared)
		defer h.receiving.streams.reserved.Add(shared - limit)
		var conns []*grpc.ClientConn
		for range 5 {
			conn := h.dialFrom(t, "127.0.0.2")
			conns = append(conns, conn)
			var err error
			for n := 0; err == nil; n++ {
				if err = openPipeline(t, conn); err != nil && n < config.StreamsOwn {
					t.Fatalf("stream %d of a connection: %v", n, err)
				}
			}
			failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_TOO_MANY_SESSIONS)
		}
		other := h.dialFrom(t, "127.0.0.3")
		for i := range config.StreamsOwn + streamStep {
			if err := openPipeline(t, other); err != nil {
				t.Fatalf("stream %d of another client: %v", i, err)
			}
		}
		for _, conn := range append(conns, other) {
			if err := conn.Close(); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "all is given back", func() bool { return h.receiving.streams.reserved.Load() == limit-shared })
		eventually(t, "their clients are forgotten", func() bool {
			h.receiving.clients.mu.Lock()
			defer h.receiving.clients.mu.Unlock()
			return len(h.receiving.clients.all) <= 1 // that of the harness
		})
	})
}

// TestOneClientMayHaveThreeQuartersOfTheStreams, and the next one as much of the rest.
func TestOneClientMayHaveThreeQuartersOfTheStreams(t *testing.T) {
	r := newReceiving(0)
	const limit = 1600
	r.streams.limit = limit
	left := int64(limit)
	for _, name := range []string{"first", "second", "third"} {
		client, conns := r.clients.enter(name), [200]int64{}
		for again := true; again; {
			again = false
			for i := range conns {
				again = r.reserveStreams(client, &conns[i], streamStep) || again
			}
		}
		if has := client.reserved.Load(); has > left*3/4 || has < left*3/4-2*streamStep {
			t.Errorf("the %s client has %d of %d streams", name, has, left)
		}
		left -= client.reserved.Load()
		if free := limit - r.streams.reserved.Load(); free != left {
			t.Errorf("%d are free, not %d", free, left)
		}
	}
}

package server

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/transport"
	"github.com/epochkv/epochkv/internal/vfs"
)

func withDirect(c *config.Config) { c.Transport = config.TransportDirect }

// TestFailedPipelinesAreForgotten: a pipeline whose deadline passes is not counted any more, before
// the server drains.
func TestFailedPipelinesAreForgotten(t *testing.T) {
	h := mustStart(t, withDirect)
	h.put(t, "k", "v") // the client has connected
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	stream, err := h.kv.Pipeline(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("got %v", err)
	}
	eventually(t, "no stream is open", func() bool { return h.counters.streams.Load() == 0 })
	h.direct.streams.mu.Lock()
	defer h.direct.streams.mu.Unlock()
	if n := len(h.direct.streams.all); n != 0 {
		t.Errorf("%d pipelines are kept", n)
	}
}

// TestEndedConnectionsHaveNoTimer: an ended connection is not kept by the deadlines of its requests.
func TestEndedConnectionsHaveNoTimer(t *testing.T) {
	c := new(directClient)
	q := &c.acks
	q.watchLocked(c, time.Now().Add(time.Hour))
	q.close()
	if q.timer.Stop() {
		t.Error("the timer still ran")
	}
	q.due = time.Time{}
	q.watchLocked(c, time.Now().Add(time.Hour))
	if q.timer.Stop() {
		t.Error("the timer ran again")
	}
}

// TestCancelledPipelinesTakeNoLockOfThemselves: the transport says that a pipeline is cancelled
// while it holds the connection's mutex, for which a holder of the pipeline's mutex may wait.
func TestCancelledPipelinesTakeNoLockOfThemselves(t *testing.T) {
	h := mustStart(t, withDirect)
	until := make(chan struct{})
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until})
	defer close(until)
	defer rule.Remove()
	stream, err := h.kv.Pipeline(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	put := &pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC}}}
	if err := stream.Send(put); err != nil {
		t.Fatal(err)
	}
	var p *directPipeline
	eventually(t, "the answer waits", func() bool {
		p = h.anyPipeline()
		return p != nil && p.waits() == 1
	})
	h.direct.streams.take(p.request) // as at its end with an error
	p.mu.Lock()
	cancelled := make(chan struct{})
	go func() {
		p.client.Cancelled(p.request)
		close(cancelled)
	}()
	select {
	case <-cancelled:
	case <-time.After(20 * time.Second):
		t.Error("the cancellation waits for the pipeline's mutex")
	}
	p.mu.Unlock()
	<-cancelled
	h.direct.streams.add(p.request, p) // for the stream's own end
}

func (s *Server) anyPipeline() *directPipeline {
	s.direct.streams.mu.Lock()
	defer s.direct.streams.mu.Unlock()
	for _, stream := range s.direct.streams.all {
		p, _ := stream.(*directPipeline)
		return p
	}
	return nil
}

func (p *directPipeline) waits() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.waiting
}

// TestNoPipelineBeginsAfterTheDrain: a pipeline that begins at the moment of a drain is refused: one
// that the drain does not find would end with the drain timeout.
func TestNoPipelineBeginsAfterTheDrain(t *testing.T) {
	var q directStreams
	q.drain()
	if q.add(transport.Request{}, new(directPipeline)) {
		t.Error("a pipeline began")
	}
}

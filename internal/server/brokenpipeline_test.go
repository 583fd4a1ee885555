package server

import (
	"bytes"
	"context"
	"errors"
	"runtime/debug"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// TestBrokenPipelineGivesItsAnswersBack: at once and not when the garbage collector finds them:
// those that wait for the disk, the one that waits for room among them, and the one that is
// executed when the stream breaks.
func TestBrokenPipelineGivesItsAnswersBack(t *testing.T) {
	h := mustStart(t)
	h.heldSyncs(t)
	for round := range 3 {
		ctx, cancel := context.WithCancel(testContext(t))
		stream := h.pipeline(t, ctx)
		mustSend(t, stream, putRequest(1, "k", string(bytes.Repeat([]byte("v"), 200<<10)), pb.Durability_DURABILITY_SYNC))
		for i := range uint64(20) {
			mustSend(t, stream, getRequest(2+i, "k"))
		}
		eventually(t, "the ack queue is full", func() bool { _, _, answers := h.admission.inflight(); return answers >= 6*200<<10 })
		before := debug.SetGCPercent(-1)
		cancel()
		eventually(t, "the stream has ended", func() bool { return h.counters.streams.Load() == 0 })
		for range 200 { // and the receiver soon
			if _, _, answers := h.admission.inflight(); answers == 0 {
				break
			}
			time.Sleep(5 * time.Millisecond)
		}
		if _, _, answers := h.admission.inflight(); answers != 0 {
			t.Errorf("round %d: %d bytes of answers are counted that nothing will send", round, answers)
		}
		debug.SetGCPercent(before)
	}
}

// drainingPipeline is a pipeline whose server drains while its receiver executes a request.
func drainingPipeline(ctx context.Context, stream grpc.ServerStream) (p *pipeline, ended chan error) {
	s := &Server{drain: drain{begun: make(chan struct{})}}
	p = &pipeline{stream: stream}
	p.server, p.ctx, p.conn = s, ctx, &connection{shard: new(telemetry.Requests).Shard()}
	p.init()
	p.executing.Store(true)
	s.drain.active.Store(true)
	close(s.drain.begun)
	ended = make(chan error, 1)
	go func() { ended <- p.acknowledge(ctx, nil) }()
	return p, ended
}

// TestDrainingPipelineRests lets a receiver be held up, as a client that does not read or a commit
// that waits would do. The acker of the pipeline waits for it without work, and ends when it rests.
func TestDrainingPipelineRests(t *testing.T) {
	// The clock of the test goes on when all goroutines wait: never, if the acker looks again and again.
	spins := time.AfterFunc(time.Minute, func() { panic("the acker of a draining pipeline works while it waits") })
	defer spins.Stop()
	synctest.Test(t, func(t *testing.T) {
		p, ended := drainingPipeline(t.Context(), discard{})
		select {
		case err := <-ended:
			t.Fatalf("the stream ended within a request: %v", err)
		case <-time.After(time.Hour):
		}
		p.rest()
		if err := <-ended; !errors.Is(err, errShuttingDown) {
			t.Error(err)
		}
	})
}

// TestDrainingPipelineEndsWithItsStream ends the stream while a request is being executed that does
// not end: the acker must not wait for it.
func TestDrainingPipelineEndsWithItsStream(t *testing.T) {
	ctx, cancel := context.WithCancel(testContext(t))
	p, ended := drainingPipeline(ctx, discard{})
	defer p.rest()
	time.Sleep(50 * time.Millisecond) // until the acker waits
	cancel()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the acker of an ended stream still waits for the receiver")
	}
}

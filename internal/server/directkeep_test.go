package server

import (
	"errors"
	"io"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// TestKeptAnswersAreUsedAgain: an answer of a pipeline that waits takes the memory of one that was
// delivered.
func TestKeptAnswersAreUsedAgain(t *testing.T) {
	var p directPipeline
	p.server = new(Server)
	p.pipelineAnswers.init(&p.server.admission.waiting, owned{})
	a := answer{id: 1}
	allocated := testing.AllocsPerRun(100, func() {
		keptAnswers.Put(p.keep(&a)) // as deliver does
	})
	if allocated != 0 {
		t.Errorf("keeping an answer allocates %v times", allocated)
	}
}

// TestIdlePipelinesKeepLittle: thousands of pipelines may be open, and idle after they have carried values of some ten KiB, which no share counts
// any more.
func TestIdlePipelinesKeepLittle(t *testing.T) {
	before := trimEvery
	t.Cleanup(func() { trimEvery = before })
	trimEvery = 5 * time.Millisecond
	h := mustStart(t, withDirect)
	stream := h.pipeline(t, testContext(t))
	value := string(make([]byte, pooledBytesMax-4<<10))
	for range 2 {
		mustSend(t, stream, putRequest(1, "k", value, pb.Durability_DURABILITY_ASYNC))
		mustRecv(t, stream)
		mustSend(t, stream, getRequest(2, "k"))
		if got := mustRecv(t, stream).GetGet().GetValue(); string(got) != value {
			t.Fatalf("got %d bytes", len(got))
		}
		p := h.anyPipeline()
		eventually(t, "the buffers are given back", func() bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return !p.executing && cap(p.value)+cap(p.in.put.Put.Value) == 0
		})
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pipeline has ended", func() bool { return h.counters.streams.Load() == 0 })
}

// TestPipelinesThatHaveEndedKeepNoBuffers while their clients take nothing of their answers: nothing trims them any more.
func TestPipelinesThatHaveEndedKeepNoBuffers(t *testing.T) {
	before := trimEvery
	t.Cleanup(func() { trimEvery = before })
	trimEvery = time.Hour
	h := mustStart(t, withDirect)
	stream, err := pb.NewKVServiceClient(h.dialDeaf(t)).Pipeline(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	value := string(make([]byte, pooledBytesMax-4<<10))
	mustSend(t, stream, putRequest(1, "k", value, pb.Durability_DURABILITY_ASYNC))
	mustRecv(t, stream)
	const gets = 2 // the window has room for one
	for i := range uint64(gets) {
		eventually(t, "the answer to the get before is sent", func() bool { return h.anyPipeline().conn.waitingBytes() == 0 })
		mustSend(t, stream, getRequest(2, "k"))
		eventually(t, "the get is executed", func() bool { return h.observer.requests.Totals(telemetry.MethodGet).Count == i+1 })
	}
	p := h.anyPipeline()
	buffers := func() int {
		p.mu.Lock()
		defer p.mu.Unlock()
		return cap(p.value) + cap(p.in.put.Put.GetValue())
	}
	if n := buffers(); n < 2*len(value) {
		t.Fatalf("the pipeline has buffers of %d bytes", n)
	}
	if err := stream.CloseSend(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the pipeline has ended", func() bool { return h.counters.streams.Load() == 0 })
	if n := buffers(); n > 0 || p.conn.waitingBytes() == 0 {
		t.Errorf("the pipeline keeps buffers of %d bytes, and %d bytes of answers wait", n, p.conn.waitingBytes())
	}
	p.trim() // which has found the pipeline before it ended
	for range gets {
		if got := mustRecv(t, stream).GetGet().GetValue(); string(got) != value {
			t.Errorf("got %d bytes", len(got))
		}
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

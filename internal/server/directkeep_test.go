package server

import (
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
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

package server

import (
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// pipelined sends requests on a pipeline.
func (c *rawClient) pipelined(stream uint32, requests ...*pb.PipelineRequest) {
	c.t.Helper()
	for _, r := range requests {
		message, err := r.MarshalVT()
		if err != nil {
			c.t.Fatal(err)
		}
		c.send(frame(frameData, 0, stream, append(prefixed(len(message))[:grpcPrefixBytes], message...)))
	}
}

// returnedSync is a pipelined write that answers with the value of a key, and waits for the disk.
func returnedSync(key string) *pb.PipelineRequest {
	touch := &pb.Invocation{Key: []byte(key), Operation: &pb.Invocation_Touch{Touch: true}, TtlMs: 3_600_000, ReturnOld: true}
	return &pb.PipelineRequest{Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: touch, Durability: pb.Durability_DURABILITY_SYNC}}}
}

// queueing waits for a connection that has so many answers in the queues of its pipelines: the receivers are not going to send them.
func (h *harness) queueing(t *testing.T, answers int) (found *connection) {
	t.Helper()
	eventually(t, "answers are queued", func() bool {
		h.connections.mu.Lock()
		defer h.connections.mu.Unlock()
		for conn := range h.connections.all {
			conn.info.mu.Lock()
			if len(conn.info.queued) == answers {
				found = conn.info
			}
			conn.info.mu.Unlock()
		}
		return found != nil
	})
	return found
}

// TestALargeAnswerIsOverdueBehindAnswersThatAreNotTaken: its client decides how long it waits, wherever that is. While it waits for the disk, the
// time of its client does not run.
func TestALargeAnswerIsOverdueBehindAnswersThatAreNotTaken(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { // the other transport sends without waiting
		c.Transport, c.SegmentSize, c.MemtableSize = config.TransportGRPC, 16*config.MiB, 16*config.MiB
		c.MessageTimeout, c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = time.Hour, 4*config.MiB, config.MiB, config.MiB
	})
	for key, size := range map[string]int{"medium": 100 << 10, "large": 500 << 10, "larger": 900 << 10} { // the share has 768 KiB
		h.commitInStore(t, key, make([]byte, size))
	}
	slot := &h.admission.words[shareAnswers].large
	for name, large := range map[string]*pb.PipelineRequest{
		"in the receiver":   getRequest(9, "large"),
		"in the queue":      returnedSync("large"),
		"until it has room": returnedSync("larger"), // more than ackQueueBytesMax together with what the queue has
	} {
		t.Run(name, func(t *testing.T) {
			c := h.dialRaw(t)
			c.send(frame(4, 0, 0, []byte{0, 4, 0, 0, 0, 0})) // no window
			c.begin(1, pb.KVService_Pipeline_FullMethodName, "120S")
			release := h.holdSyncs(t) // or the receiver sends them
			c.pipelined(1, returnedSync("medium"), returnedSync("medium"), returnedSync("medium"))
			conn := h.queueing(t, 3)
			release()
			eventually(t, "the second answer waits for the client", func() bool { return conn.waitingBytes() >= 200<<10 })
			if large.GetInvoke() != nil {
				release = h.holdSyncs(t)
			}
			c.pipelined(1, large)
			eventually(t, "a large one has the slot", func() bool { return slot.bytes() > 0 })
			if slot.take(new(connection), nil, 1<<20) {
				t.Fatal("the slot is taken twice")
			}
			isOverdue := func() bool {
				h.connections.mu.Lock()
				defer h.connections.mu.Unlock()
				for conn := range h.connections.all {
					conn.checkUnread()
				}
				return slot.isOverdue(conn, 0, 0)
			}
			if large.GetInvoke() != nil {
				eventually(t, "it is written", func() bool { return h.store.Visible() > h.store.Durable() })
				if isOverdue() || conn.waitingBytes() >= 400<<10 {
					t.Error("an answer that waits for the disk is its client's to take")
				}
			}
			release()
			eventually(t, "it is its client's to take", isOverdue)
			eventually(t, "each waits once", func() bool { isOverdue(); return conn.waitingBytes() == conn.answerBytes()+slot.bytes() })
			_ = c.Close()
			eventually(t, "all is given back", func() bool { _, _, n := h.admission.inflight(); return n == 0 })
			conn.mu.Lock()
			defer conn.mu.Unlock()
			if len(conn.queued) > 0 || conn.waiting != 0 {
				t.Errorf("%d answers are queued, %d bytes wait", len(conn.queued), conn.waiting)
			}
		})
	}
}

// TestALargeReadInTheSlotDoesNotWaitForAnAnswerToBeTaken: a pipelined batch that would have to, because a get before it has found a large value
// meanwhile, is refused. It needs no room but the slot, and what it had is given back.
func TestALargeReadInTheSlotDoesNotWaitForAnAnswerToBeTaken(t *testing.T) {
	h, _, release := startCold(t, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.BatchSize, c.Limits.ValueSize = 4*config.MiB, config.MiB, config.MiB
	})
	stream := h.pipeline(t, testContext(t))
	mustSend(t, stream, getRequest(1, "memory"))
	mustRecv(t, stream)
	h.direct.streams.mu.Lock()
	var p *directPipeline
	for _, s := range h.direct.streams.all {
		p = s.(*directPipeline) //nolint:forcetypeassert // the test opens nothing else
	}
	h.direct.streams.mu.Unlock()
	batch := func(id uint64, keys int, last []byte) *pb.PipelineRequest { // all but the last are in memory
		m := &pb.BatchGetRequest{}
		for range keys {
			m.Keys = append(m.Keys, []byte("memory"))
		}
		m.Keys = append(m.Keys, last)
		return &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_BatchGet{BatchGet: m}}
	}
	const large, small = 2000, 600 // the share has 512 KiB: 232 bytes each
	reads := &h.admission.words[shareLargeReads]
	behind := func() { // a get that has found a large value while the batch is tried
		eventually(t, "the request before is executed", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return !p.executing }) // or the pipeline rests after it
		p.mu.Lock()
		defer p.mu.Unlock()
		p.reads.alone = append(p.reads.alone, &laterRead{})
	}
	isAlone := func(n int) func() bool {
		return func() bool { p.mu.Lock(); defer p.mu.Unlock(); return len(p.reads.alone) == n }
	}
	behind()
	mustSend(t, stream, batch(2, large, coldKey(1)))
	if got := mustRecv(t, stream); got.Id != 2 || got.GetError() == nil || reads.large.bytes() != 0 {
		t.Fatalf("a batch in the slot: %.200v; the slot has %d bytes", got, reads.large.bytes())
	}
	if n := h.admission.refused.Load(); n != 1 {
		t.Errorf("%d requests are refused", n)
	}
	p.nextAlone()
	eventually(t, "the pipeline goes on", isAlone(0))
	behind()
	mustSend(t, stream, batch(3, small, coldKey(1)))
	eventually(t, "a batch in the share waits", isAlone(2))
	release()
	p.nextAlone()
	if got := mustRecv(t, stream); got.Id != 3 || len(got.GetBatchGet().GetResults()) != small+1 {
		t.Errorf("a batch in the share: %.200v", got)
	}
	mustSend(t, stream, batch(4, large, coldKey(2)))
	if got := mustRecv(t, stream); got.Id != 4 || len(got.GetBatchGet().GetResults()) != large+1 {
		t.Errorf("a batch in the slot that is the first: %.200v", got)
	}
	eventually(t, "all is given back", func() bool {
		n, bytes, answers := h.admission.inflight()
		return n == 0 && bytes == 0 && answers == 0 && h.admission.sessions.reads.held.Load() == 0
	})
}

// TestAnAnswerThatIsGivenBackIsInNoQueue: a connection may have very many answers that wait for the disk, one after the other.
func TestAnAnswerThatIsGivenBackIsInNoQueue(t *testing.T) {
	var a admission
	a.init(10, 16<<20)
	conn := new(connection)
	charge := func() *memoryCharge {
		held, err := a.charge(conn, 100<<10, true)
		if err != nil {
			t.Fatal(err)
		}
		held.queue(ackWait{}, nil) // which may be sent
		return held
	}
	sent, unsent := charge(), charge()
	unsent.release()
	conn.handOverReady()
	if conn.waitingBytes() != 100<<10 {
		t.Errorf("%d bytes wait", conn.waitingBytes())
	}
	if sent.release(); len(conn.queued) != 0 || conn.waitingBytes() != 0 {
		t.Errorf("%d answers are in queues, %d bytes wait", len(conn.queued), conn.waitingBytes())
	}
	conn.end(&a)
	charge()
	if len(conn.queued) != 0 {
		t.Error("an answer of a connection that has ended is in a queue")
	}
}

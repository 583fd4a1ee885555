package server

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// overGRPC starts a server whose pipelines execute what comes after answers that are not read. With direct they only try reads; see auditwaiting_test.go.
func overGRPC(c *config.Config) { c.Transport = config.TransportGRPC }

// withBlockingAudit refuses requests whose lines find no room.
func withBlockingAudit(c *config.Config) { c.Audit.Full = audit.FullBlock }

// invokeRequest sets a key, and is answered with the value.
func invokeRequest(id uint64, key string, value []byte) *pb.PipelineRequest {
	return &pb.PipelineRequest{Id: id, Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{
		Durability: pb.Durability_DURABILITY_SYNC,
		Invocation: &pb.Invocation{Key: []byte(key), ReturnNew: true, Operation: &pb.Invocation_GetAndSet{GetAndSet: value}},
	}}}
}

// wantOneLineEach expects one line for each key.
func wantOneLineEach(t *testing.T, all []auditLine, keys ...string) {
	t.Helper()
	for _, key := range keys {
		n := 0
		for _, l := range all {
			if slices.Contains(l.Writes, key) {
				n++
			}
		}
		if n != 1 {
			t.Errorf("%s is written, and has %d lines", key, n)
		}
	}
}

// inOneSegment leaves room in the first segment of the log for the writes of a test: the next one would wait for a sync.
func inOneSegment(c *config.Config) { c.SegmentSize = 8 * config.MiB }

// executedFirst has the first writes of an unread pipeline wait for the disk until the server has executed them, which executed awaits. Otherwise the
// receiver itself sends the answer of one that is durable at once, waits for the client with it, and executes nothing more.
func (h *harness) executedFirst(t *testing.T, writes int) (executed func()) {
	release, before := h.holdSyncs(t), h.store.Visible()
	return func() {
		t.Helper()
		eventually(t, "all are executed", func() bool { return h.store.Visible() >= before+keys.Epoch(writes) })
		release()
	}
}

// TestWritesOfABrokenPipelineHaveTheirLines: also the one whose answer waits for room among those that the client has not read. startAudited looks at
// the room of their lines, too.
func TestWritesOfABrokenPipelineHaveTheirLines(t *testing.T) {
	h, lines := startAudited(t, overGRPC, withBlockingAudit, inOneSegment)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	stream, err := pb.NewKVServiceClient(h.dialDeaf(t)).Pipeline(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	executed := h.executedFirst(t, 2) // the third waits until there is room for the answer of the second
	for i := range uint64(3) {
		key := fmt.Sprintf("key-%d", i)
		mustSend(t, stream, invokeRequest(i+1, key, bytes.Repeat([]byte("v"), 600<<10)))
		keys = append(keys, key)
	}
	executed()
	eventually(t, "all are written", func() bool { return h.get(t, keys[2]).Found })
	cancel()
	eventually(t, "the stream has ended", func() bool { return h.counters.streams.Load() == 0 })
	wantOneLineEach(t, lines(), keys...)
}

// brokenAfter is a stream that breaks after some messages.
type brokenAfter struct {
	grpc.ServerStream
	messages int
}

func (b *brokenAfter) SendMsg(any) error {
	if b.messages--; b.messages < 0 {
		return errors.New("broken")
	}
	return nil
}

// TestAnswersOfABrokenPipelineEndOnce: those that were sent, that which failed, and those that were not.
func TestAnswersOfABrokenPipelineEndOnce(t *testing.T) {
	h := mustStart(t)
	later := ackWait{epoch: 1 << 40, durability: mvcc.DurabilitySync}
	waiting := []answer{{id: 1}, {id: 2, ackWait: later}, {id: 3}, {id: 4}, {id: 5, ackWait: later}}
	for i := range waiting {
		waiting[i].method = telemetry.MethodPut
	}
	p := &pipeline{stream: &brokenAfter{messages: 1}}
	p.server, p.ctx, p.conn = h.Server, t.Context(), &connection{shard: new(telemetry.Requests).Shard()}
	p.init()
	left, err := p.sendAcknowledged(waiting)
	var ids []uint64
	for i := range left {
		ids = append(ids, left[i].id)
	}
	if err == nil || !slices.Equal(ids, []uint64{2, 4, 5}) {
		t.Errorf("%v: %d are left", err, ids)
	}
}

// TestAnUnreadPipelineLeavesRoomInTheAuditLog: thousands of its writes may wait for their turn among answers that the client does not read. They are
// executed, and others need the room of their lines.
func TestAnUnreadPipelineLeavesRoomInTheAuditLog(t *testing.T) {
	h, lines := startAudited(t, overGRPC, withBlockingAudit, inOneSegment, smallAudit)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	stream, err := pb.NewKVServiceClient(h.dialDeaf(t)).Pipeline(ctx)
	if err != nil {
		t.Fatal(err)
	}
	const small = 200 // more than the queue has room for
	keys := []string{"large-0", "large-1"}
	executed := h.executedFirst(t, len(keys)+small)
	for i, key := range keys {
		mustSend(t, stream, invokeRequest(uint64(i), key, bytes.Repeat([]byte("v"), 400<<10)))
	}
	for i := range uint64(small) {
		key := fmt.Sprintf("small-%d", i)
		mustSend(t, stream, putRequest(10+i, key, "v", pb.Durability_DURABILITY_SYNC))
		keys = append(keys, key)
	}
	executed()
	eventually(t, "all are written", func() bool { return h.get(t, keys[len(keys)-1]).Found })
	eventually(t, "nothing has room for its line", func() bool { return h.observer.audit.stats().QueueBytes == 0 })
	h.put(t, "of another client", "v")
	cancel()
	eventually(t, "the stream has ended", func() bool { return h.counters.streams.Load() == 0 })
	wantOneLineEach(t, lines(), append(keys, "of another client")...)
}

// linesOf counts the lines of a method while the server runs.
func (h *harness) linesOf(t *testing.T, method string) int {
	t.Helper()
	text, err := os.ReadFile(h.config.Audit.File)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(text, []byte(`"method":"`+method+`"`))
}

// TestAnUnreadAnswerOfAPipelineHasItsLine while it waits for its client.
func TestAnUnreadAnswerOfAPipelineHasItsLine(t *testing.T) {
	h, _ := startAudited(t, overGRPC, withBlockingAudit, func(c *config.Config) { c.Audit.Classes = "write,read" })
	h.putValue(t, "large", 600<<10)
	stream, err := pb.NewKVServiceClient(h.dialDeaf(t)).Pipeline(testContext(t))
	if err != nil {
		t.Fatal(err)
	}
	mustSend(t, stream, getRequest(1, "large"), getRequest(2, "large")) // the second waits
	eventually(t, "both have lines", func() bool { return h.linesOf(t, "Get") == 2 })
	eventually(t, "neither has room for more", func() bool { return h.observer.audit.stats().QueueBytes == 0 })
}

// TestWhatTheAuditLogSaysOfQueuedAnswersIsBounded: it is counted with them.
func TestWhatTheAuditLogSaysOfQueuedAnswersIsBounded(t *testing.T) {
	a := answer{value: make([]byte, 10)}
	a.details.note = &auditNote{reads: []string{"12", "345"}, writes: []string{"6"}}
	var q ackQueue
	q.init(new(waitingAnswers), owned{}, nil)
	if err := q.push(t.Context(), &a); err != nil || q.bytes != 16 {
		t.Errorf("%v: %d bytes are counted", err, q.bytes)
	}
	if q.sent(a.queuedBytes()); q.bytes != 0 {
		t.Errorf("%d bytes are counted of an answer that was sent", q.bytes)
	}
}

// TestAnUnreadCommitHasItsLine while its answer waits for its client among those of the reads before it.
func TestAnUnreadCommitHasItsLine(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h, lines := startAudited(t, with, withBlockingAudit)
		h.putValue(t, "large", 200<<10)
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		stream, err := pb.NewTransactionServiceClient(h.dialDeaf(t)).Transact(ctx)
		if err != nil {
			t.Fatal(err)
		}
		for _, req := range []*pb.TransactRequest{beginRequest(&pb.BeginRequest{}), txnPutRequest("k", "v"), txnGetRequest("large"), commitRequest} {
			if err := stream.Send(req); err != nil {
				t.Fatal(err)
			}
		}
		eventually(t, "it has its line", func() bool { return h.linesOf(t, "Commit") == 1 })
		cancel()
		eventually(t, "the stream has ended", func() bool { return h.counters.streams.Load() == 0 })
		wantOneLineEach(t, lines(), "k")
	})
}

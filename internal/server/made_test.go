package server

import (
	"bytes"
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// TestWhatARequestMakesIsALargeWrite: a request of some bytes that writes large values again has as much in memory as a batch of these values. While
// large writes have no room, and while their slot is taken, it is refused, and changes nothing. What the request itself has is not counted twice.
func TestWhatARequestMakesIsALargeWrite(t *testing.T) {
	const values, size = 3, 4 << 20
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) { c.Limits.InflightBytes = 128 * config.MiB })
		ctx := testContext(t)
		h.putLarge(t, values, size)
		txns := pb.NewTransactionServiceClient(h.conn)
		var adding, touching []*pb.Invocation
		var executed []*pb.Operation
		for i := range values {
			key := fmt.Appendf(nil, "large/%03d", i)
			adding = append(adding, &pb.Invocation{Key: key, Operation: &pb.Invocation_Append{Append: []byte("w")}})
			touching = append(touching, &pb.Invocation{Key: key, Operation: &pb.Invocation_Touch{Touch: true}, TtlMs: 3_600_000})
			executed = append(executed, invokeOperation(adding[i]))
		}
		invokeAll := func(list []*pb.Invocation) func() error {
			return func() error {
				_, err := h.kv.InvokeAll(ctx, &pb.InvokeAllRequest{Invocations: list})
				return err
			}
		}
		writes := &h.admission.words[shareLargeWrites]
		for _, c := range []struct {
			name   string
			change func() error
			own    bool // nothing is made
		}{
			{"Invoke", func() error { _, err := h.kv.Invoke(ctx, &pb.InvokeRequest{Invocation: adding[0]}); return err }, false},
			{"InvokeAll", invokeAll(adding), false},
			{"InvokeAll that changes deadlines", invokeAll(touching), false},
			{"InvokeAll in a pipeline", func() error { return h.pipelined(t, ctx, adding) }, false},
			{"Execute", func() error {
				_, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: executed})
				return err
			}, false},
			{"InvokeAll that replaces", invokeAll([]*pb.Invocation{
				{Key: []byte("large/000"), Operation: &pb.Invocation_GetAndSet{GetAndSet: make([]byte, 200<<10)}},
			}), true},
		} {
			t.Run(c.name, func(t *testing.T) {
				eventually(t, "nothing is counted", func() bool { return h.holdsNothing() })
				release := h.fillShare(shareLargeWrites, 1<<20+200<<10) // of which a connection may have a quarter
				others := writes.word.Load()
				before := h.get(t, "large/000")
				err := c.change()
				if (err == nil) != c.own || err != nil && status.Code(err) != codes.ResourceExhausted {
					t.Errorf("without room: %v", err)
				}
				if after := h.get(t, "large/000"); !c.own && (after.Epoch != before.Epoch || !bytes.Equal(after.Value, before.Value)) {
					t.Error("it was refused, and has changed a value")
				}
				eventually(t, "what was refused is not counted any more", func() bool { return writes.word.Load() == others })
				release()
				if err := c.change(); err != nil {
					t.Errorf("with room: %v", err)
				}
				eventually(t, "nothing is counted any more", func() bool { return h.holdsNothing() })
			})
		}
	})
}

// holdsNothing reports whether no share of requests and answers has anything, and no client has requests.
func (h *harness) holdsNothing() bool {
	for sh := range h.admission.words {
		if w := &h.admission.words[sh]; w.word.Load() != 0 || w.large.bytes() != 0 {
			return false
		}
	}
	for _, kind := range []ownedKind{ownedReadRequests, ownedWriteRequests, ownedLargeReadRequests, ownedLargeWriteRequests} {
		if h.clientsHave(kind) != 0 {
			return false
		}
	}
	return true
}

// pipelined sends an InvokeAll over a pipeline of its own.
func (h *harness) pipelined(t *testing.T, ctx context.Context, list []*pb.Invocation) error {
	t.Helper()
	stream := h.pipeline(t, ctx)
	mustSend(t, stream, &pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_InvokeAll{InvokeAll: &pb.InvokeAllRequest{Invocations: list}}})
	out := mustRecv(t, stream)
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return status.ErrorProto(out.GetError())
}

// TestAGrowingWriteKeepsTheSlot: what a request makes takes the large slot once, whatever others ask for meanwhile: another turn between would refuse each
// request that grows beyond the share while others want the slot.
func TestAGrowingWriteKeepsTheSlot(t *testing.T) {
	h := mustStart(t)
	one, two := h.connections.admit(nil), h.connections.admit(nil)
	defer h.connections.release(one)
	defer h.connections.release(two)
	c, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	c.ctx = peer.NewContext(testContext(t), &peer.Peer{AuthInfo: one})
	limit := int(h.admission.words[shareLargeWrites].limit.bytes)
	for n := smallRequestMax; n < 4*limit; n += n / 8 { // at first in the share
		if err := c.admitMade(n); err != nil {
			t.Fatalf("%d bytes of a share of %d: %v", n, limit, err)
		}
		if n > limit && h.admission.enter(two, shareLargeWrites, 2*limit) {
			t.Fatal("the slot has two requests")
		}
	}
	c.release()
	if !h.holdsNothing() {
		t.Error("something is counted after the request")
	}
	if !h.admission.enter(two, shareLargeWrites, 2*limit) {
		t.Fatal("the slot is not free after the request")
	}
	h.admission.leave(two, shareLargeWrites, 2*limit)
}

// TestALaneThatRestsKeepsNoLargeRequest: it may rest for long.
func TestALaneThatRestsKeepsNoLargeRequest(t *testing.T) {
	h := mustStart(t)
	l := &lane{server: h.Server}
	batch := &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: []byte("k"), Value: make([]byte, 1<<20)}}}
	l.getOut = new(pb.GetResponse)
	if _, err := l.decode(telemetry.MethodBatchWrite, mustMarshal(t, batch)); err != nil {
		t.Fatal(err)
	}
	l.Rest()
	if list := l.batch.Mutations; cap(list) > 0 {
		t.Errorf("it keeps %d mutations", cap(list))
	}
}

// bulkMessages is the stream of a bulk load that has large messages without end.
type bulkMessages struct {
	grpc.ClientStreamingServer[pb.BulkLoadRequest, pb.BulkLoadResponse]
	asked chan struct{} // for each message
}

func (b *bulkMessages) RecvMsg(m any) error {
	b.asked <- struct{}{}
	message, err := proto.Marshal(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("k"), Value: make([]byte, 2*pooledBytesMax)}}})
	if err != nil {
		return err
	}
	return m.(*bulkMessage).UnmarshalVT(message) //nolint:forcetypeassert // nothing else is received
}

// TestABulkLoadHasOneLargeMessageInMemory: it receives the next one when the entries of that before are added.
func TestABulkLoadHasOneLargeMessageInMemory(t *testing.T) {
	h := mustStart(t)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	stream := &bulkMessages{asked: make(chan struct{}, 10)}
	messages := (&kvService{Server: h.Server}).receiveBulk(ctx, stream)
	for n := range 3 {
		m := <-messages
		<-stream.asked
		if asked := len(stream.asked); asked > 0 || len(messages) > 0 {
			t.Fatalf("message %d is not added yet, and %d more were received", n, asked)
		}
		close(m.added)
	}
}

// TestAMessageOfABulkLoadHasAnEntryAtLeast, and little more: it is in memory beside what others write. One that is too large is refused before it is
// received, or with gRPC's transport before it is decoded.
func TestAMessageOfABulkLoadHasAnEntryAtLeast(t *testing.T) {
	withTransports(t, func(t *testing.T, with func(*config.Config)) {
		h := mustStart(t, with, func(c *config.Config) { c.Limits.ValueSize = config.MiB })
		load := func(entries ...*pb.BulkEntry) error {
			stream, err := h.kv.BulkLoad(testContext(t))
			if err == nil {
				_ = stream.Send(&pb.BulkLoadRequest{Entries: entries, Commit: true}) // the error is that of the answer
				_, err = stream.CloseAndRecv()
			}
			return err
		}
		largest := &pb.BulkEntry{Key: bytes.Repeat([]byte("k"), h.limits.KeyBytes), Value: make([]byte, h.limits.ValueBytes)}
		if err := load(largest); err != nil {
			t.Errorf("the largest entry: %v", err)
		}
		other := &pb.BulkEntry{Key: []byte("other"), Value: make([]byte, h.limits.ValueBytes)}
		failureOf(t, load(largest, other)).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")
		if got, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: other.Key}); err != nil || got.Found {
			t.Errorf("a part of a refused message is loaded: %v, %v", got.GetFound(), err)
		}
	})
}

// TestATooLargeMessageOfABulkLoadIsNotDecoded: it would be in memory once more.
func TestATooLargeMessageOfABulkLoadIsNotDecoded(t *testing.T) {
	message := mustMarshal(t, &pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("key"), Value: []byte("value")}}})
	for most, want := range map[int]int{len(message): 1, len(message) - 1: 0} {
		m := bulkMessage{BulkLoadRequest: new(pb.BulkLoadRequest), most: most}
		if err := m.UnmarshalVT(message); err != nil || len(m.Entries) != want || (m.err == nil) != (want > 0) {
			t.Errorf("a limit of %d: %d entries, %v, %v", most, len(m.Entries), m.err, err)
		}
	}
	h := mustStart(t, withDirect)
	c := h.dialRaw(t) // sends the length alone
	c.begin(1, pb.KVService_BulkLoad_FullMethodName, "120S")
	c.send(frame(frameData, 0, 1, prefixed(bulkMessageMax(&h.config) + 1)[:grpcPrefixBytes]))
	if got := c.reasonOf(t, 1); got != "BATCH_TOO_LARGE" {
		t.Errorf("a too large message is received: %q", got)
	}
}

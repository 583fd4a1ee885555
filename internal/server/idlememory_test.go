package server

import (
	"bytes"
	"fmt"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/reflect/protoreflect"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// What is not counted must not stay: streams may be idle for hours, and sessions are pooled for good.

const (
	idleStreams = 8
	idleValue   = 4 << 20
)

// mustKeepLittle runs what may leave so many bytes in memory, so many times, and looks at what has stayed.
func mustKeepLittle(t *testing.T, times, bytes int, each func(i int)) {
	t.Helper()
	before := liveHeap()
	for i := range times {
		each(i)
	}
	if grown := liveHeap() - before; grown > int64(times*bytes/2) {
		t.Errorf("%d KiB stay in memory", grown>>10)
	}
}

// unlikely is an invocation that is not applied: the large value is not what it expects.
func unlikely(operand []byte) *pb.Invocation {
	return &pb.Invocation{Key: []byte("large/000"), Operation: &pb.Invocation_CompareAndSet{CompareAndSet: &pb.CompareAndSet{Expect: []byte("x"), Value: operand}}}
}

// batchWithDeadlines is a batch of idleValue in some puts, and of deletions. The newest versions of what has deadlines may be read before it is
// refused.
func batchWithDeadlines(puts int) *pb.BatchWriteRequest {
	const deletions = 32
	out := &pb.BatchWriteRequest{Preconditions: []*pb.Precondition{{Key: []byte("none"), Condition: &pb.Precondition_Exists{Exists: true}}}}
	for i := range puts {
		out.Mutations = append(out.Mutations, &pb.Mutation{
			Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "k%d", i), Value: make([]byte, idleValue/puts), TtlMs: 3_600_000,
		})
	}
	for i := range deletions {
		out.Mutations = append(out.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_DELETE, Key: fmt.Appendf(nil, "other%d", i)})
	}
	return out
}

// TestIdleTransactionsKeepLittle: a stream of transactions keeps neither the last message nor the values that its last invocation has read.
func TestIdleTransactionsKeepLittle(t *testing.T) {
	testseed.SkipUnderRace(t) // it measures memory
	write := txnPutRequest("k", string(bytes.Repeat([]byte("w"), idleValue)))
	for name, requests := range map[string][]*pb.TransactRequest{
		"a write without a transaction":   {write},
		"a write that was rolled back":    {beginRequest(new(pb.BeginRequest)), write, rollbackRequest},
		"an invocation, in a transaction": {beginRequest(new(pb.BeginRequest)), {Request: &pb.TransactRequest_Invoke{Invoke: unlikely([]byte("y"))}}},
	} {
		t.Run(name, func(t *testing.T) {
			h := mustStart(t)
			h.putLarge(t, 1, idleValue)
			mustKeepLittle(t, idleStreams, idleValue, func(int) {
				k := h.talk(t)
				for _, r := range requests {
					if _, err := k.say(r); err != nil && len(requests) > 1 {
						t.Fatal(err)
					}
				}
			})
		})
	}
}

// TestIdlePipelinesKeepNoAnswer: a pipeline keeps neither the last answer nor the operands of its last request.
func TestIdlePipelinesKeepNoAnswer(t *testing.T) {
	testseed.SkipUnderRace(t) // it measures memory
	read, compare := unlikely(nil), unlikely(make([]byte, idleValue))
	read.ReturnOld = true
	key := []byte("large/000")
	for name, request := range map[string]*pb.PipelineRequest{
		"the value of an invocation":   {Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: read}}},
		"the values of invocations":    {Request: &pb.PipelineRequest_InvokeAll{InvokeAll: &pb.InvokeAllRequest{Invocations: []*pb.Invocation{read}}}},
		"a batch":                      {Request: &pb.PipelineRequest_BatchGet{BatchGet: &pb.BatchGetRequest{Keys: [][]byte{key}}}},
		"a batch with deadlines":       {Request: &pb.PipelineRequest_BatchWrite{BatchWrite: batchWithDeadlines(64)}},
		"the operand of an invocation": {Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: compare}}},
		"the value of a condition": {Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: key, Preconditions: []*pb.Precondition{
			{Key: key, Condition: &pb.Precondition_ValueEquals{ValueEquals: make([]byte, idleValue)}},
		}}}},
	} {
		for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
			t.Run(name+" "+string(transport), func(t *testing.T) {
				h := mustStart(t, func(c *config.Config) { c.Transport = transport })
				h.putLarge(t, 1, idleValue)
				mustKeepLittle(t, idleStreams, idleValue, func(int) {
					stream := h.pipeline(t, testContext(t))
					mustSend(t, stream, request)
					mustRecv(t, stream)
				})
			})
		}
	}
}

// TestPooledExecutorsKeepNothingOfRequests: neither operands and the values that they met, nor the values of conditions.
func TestPooledExecutorsKeepNothingOfRequests(t *testing.T) {
	testseed.SkipUnderRace(t) // it measures memory
	conditions := func() []*pb.Precondition {
		return []*pb.Precondition{{Key: []byte("none"), Condition: &pb.Precondition_ValueEquals{ValueEquals: make([]byte, idleValue)}}}
	}
	for name, execute := range map[string]func(*executor) error{
		"an invocation": func(c *executor) error {
			_, err := c.invoke(c.ctx, &pb.InvokeRequest{Invocation: unlikely(make([]byte, idleValue))}, 0, new(pb.InvokeResponse))
			return err
		},
		"the value of an invocation": func(c *executor) error {
			_, err := c.invokeAll(c.ctx, &pb.InvokeAllRequest{Invocations: []*pb.Invocation{unlikely(nil)}}, 0, new(pb.InvokeAllResponse))
			return err
		},
		"a put with a condition": func(c *executor) error {
			_, err := c.put(c.ctx, &pb.PutRequest{Key: []byte("k"), Preconditions: conditions()})
			return err
		},
		"a batch with deadlines": func(c *executor) error {
			_, err := c.batchWrite(c.ctx, batchWithDeadlines(64))
			return err
		},
		"a batch with few deadlines": func(c *executor) error {
			_, err := c.batchWrite(c.ctx, batchWithDeadlines(8))
			return err
		},
		"an invocation with a condition": func(c *executor) error {
			_, err := c.invoke(c.ctx, &pb.InvokeRequest{Invocation: unlikely(nil), Preconditions: conditions()}, 0, new(pb.InvokeResponse))
			return err
		},
		"a deletion of a range with a condition": func(c *executor) error {
			r := &pb.DeleteRangeRequest{Range: &pb.KeyRange{Start: []byte("x")}, Preconditions: conditions()}
			_, err := c.deleteRange(c.ctx, r, new(pb.DeleteRangeResponse))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := mustStart(t)
			h.putLarge(t, 1, idleValue)
			var all []*executor // at once, so that each has a session of its own
			mustKeepLittle(t, idleStreams, idleValue, func(i int) {
				c, err := h.takeExecutor()
				if err != nil {
					t.Fatal(err)
				}
				c.ctx, c.access = testContext(t), h.authorized(t, pb.KVService_Invoke_FullMethodName)
				if _, err := c.outcome(ackWait{}, execute(c)); err != nil && statusOf(err).Code().String() != "FailedPrecondition" {
					t.Fatal(err)
				}
				if all = append(all, c); i == idleStreams-1 {
					for _, c := range all {
						c.release()
					}
				}
			})
		})
	}
}

// withUnknownBytes gives a message a field that no server knows.
func withUnknownBytes[M interface{ ProtoReflect() protoreflect.Message }](m M, bytes int) M {
	m.ProtoReflect().SetUnknown(protowire.AppendBytes([]byte{0xfa, 0x7f}, make([]byte, bytes)))
	return m
}

// TestIdleStreamsKeepNoMessage: a stream of keep-alives, and one of transactions, keeps nothing of messages of some ten KiB, which no share counts.
func TestIdleStreamsKeepNoMessage(t *testing.T) {
	const streams, size = 64, 60 << 10
	t.Run("keep-alives", func(t *testing.T) {
		h := mustStart(t, withDirect)
		mustKeepLittle(t, streams, size, func(int) {
			stream, err := pb.NewLeaseServiceClient(h.conn).KeepAlive(testContext(t))
			if err == nil {
				err = stream.Send(withUnknownBytes(&pb.KeepAliveRequest{Ids: []uint64{1}}, size))
			}
			if err == nil {
				_, err = stream.Recv()
			}
			if err != nil {
				t.Fatal(err)
			}
		})
	})
	t.Run("transactions", func(t *testing.T) {
		h := mustStart(t, withDirect)
		mustKeepLittle(t, streams, size, func(int) {
			k := h.talk(t)
			if _, err := k.say(txnPutRequest("k", string(make([]byte, size)))); err == nil {
				t.Fatal("a write without a transaction was executed")
			}
		})
	})
}

// TestAPausedWalkKeepsNoPreviousValue: while the client takes a part of a bulk load, nothing counts the previous value that was read last.
func TestAPausedWalkKeepsNoPreviousValue(t *testing.T) {
	h := mustStart(t)
	h.putLarge(t, 1, idleValue)
	if err := h.store.Checkpoint(testContext(t)); err != nil { // what is read from the tree is copied
		t.Fatal(err)
	}
	var walks []*watchWalk
	sw := &streamWatch{options: watchOptions{values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS}}
	mustKeepLittle(t, idleStreams, idleValue, func(int) {
		x, err := h.store.Session()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(x.Close)
		if _, err := x.OpenSnapshot(0); err != nil {
			t.Fatal(err)
		}
		k := &watchWalk{kind: walkLoad, since: 1, previous: x, room: 2 * idleValue, snapshot: &openSnapshot{ctx: testContext(t)}}
		e := &pb.ChangeEvent{Key: []byte("large/000")}
		if err := k.setPrevious(sw, e); err != nil || len(e.PreviousValue) != idleValue {
			t.Fatalf("%d bytes, %v", len(e.PreviousValue), err)
		}
		k.pause()
		walks = append(walks, k)
	})
}

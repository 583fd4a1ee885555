package server

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

func newRequestID(t testing.TB) []byte {
	t.Helper()
	id, err := uuid.NewV7()
	if err != nil {
		t.Fatal(err)
	}
	return id[:]
}

// identified are requests of every kind that changes data, each of keys of its own. Executed twice, most of them would
// answer something else the second time.
func identified(h *harness, t testing.TB) map[string]func(id []byte) (proto.Message, error) {
	kv, txns := h.kv, pb.NewTransactionServiceClient(h.conn)
	key := func(s string) []byte { return []byte(s) }
	return map[string]func(id []byte) (proto.Message, error){
		"put": func(id []byte) (proto.Message, error) {
			return kv.Put(testContext(t), &pb.PutRequest{
				Key: key("put"), Value: key("v"), RequestId: id,
				Preconditions: []*pb.Precondition{{Key: key("put"), Condition: &pb.Precondition_Exists{Exists: false}}},
			})
		},
		"delete": func(id []byte) (proto.Message, error) {
			return kv.Delete(testContext(t), &pb.DeleteRequest{Key: key("delete"), RequestId: id})
		},
		"batch": func(id []byte) (proto.Message, error) {
			return kv.BatchWrite(testContext(t), &pb.BatchWriteRequest{RequestId: id, Mutations: []*pb.Mutation{
				{Kind: pb.Mutation_KIND_PUT, Key: key("b2"), Value: key("v")}, {Kind: pb.Mutation_KIND_PUT, Key: key("b1"), Value: key("v")},
			}})
		},
		"range deletion": func(id []byte) (proto.Message, error) {
			return kv.DeleteRange(testContext(t), &pb.DeleteRangeRequest{Range: &pb.KeyRange{Prefix: key("range")}, RequestId: id})
		},
		"invoke": func(id []byte) (proto.Message, error) {
			return kv.Invoke(testContext(t), &pb.InvokeRequest{Invocation: increment("invoke", 1), RequestId: id})
		},
		"invoke all": func(id []byte) (proto.Message, error) {
			return kv.InvokeAll(testContext(t), &pb.InvokeAllRequest{
				Invocations: []*pb.Invocation{increment("all2", 1), increment("all1", 1)}, RequestId: id,
			})
		},
		"execute that only writes": func(id []byte) (proto.Message, error) {
			return txns.Execute(testContext(t), &pb.ExecuteRequest{
				RequestId:  id,
				Conditions: []*pb.TxnCondition{{Condition: &pb.TxnCondition_Key{Key: &pb.Precondition{Key: key("direct"), Condition: &pb.Precondition_Exists{}}}}},
				ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{
					Write: &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key("direct"), Value: key("v")},
				}}},
			})
		},
		"execute": func(id []byte) (proto.Message, error) {
			return txns.Execute(testContext(t), &pb.ExecuteRequest{
				RequestId:  id,
				Conditions: []*pb.TxnCondition{{Condition: &pb.TxnCondition_Key{Key: &pb.Precondition{Key: key("x"), Condition: &pb.Precondition_Exists{}}}}},
				ThenOperations: []*pb.Operation{
					{Operation: &pb.Operation_Invoke{Invoke: increment("x", 1)}},
					{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: key("x")}}},
				},
			})
		},
		"pipelined put": func(id []byte) (proto.Message, error) {
			return pipelined(t, h, &pb.PipelineRequest{Request: &pb.PipelineRequest_Put{
				Put: &pb.PutRequest{Key: key("piped"), Value: key("v"), RequestId: id},
			}})
		},
		"pipelined invoke": func(id []byte) (proto.Message, error) {
			return pipelined(t, h, &pb.PipelineRequest{Request: &pb.PipelineRequest_Invoke{
				Invoke: &pb.InvokeRequest{Invocation: increment("piped invoke", 1), RequestId: id},
			}})
		},
		"transaction": func(id []byte) (proto.Message, error) {
			stream, err := txns.Transact(testContext(t))
			if err != nil {
				return nil, err
			}
			var out *pb.TransactResponse
			for _, req := range []*pb.TransactRequest{
				{Request: &pb.TransactRequest_Begin{Begin: new(pb.BeginRequest)}},
				{Request: &pb.TransactRequest_Invoke{Invoke: increment("txn", 1)}},
				{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{RequestId: id}}},
			} {
				if err := stream.Send(req); err != nil {
					return nil, err
				}
				if out, err = stream.Recv(); err != nil {
					return nil, err
				}
				if out.GetError() != nil {
					return nil, fmt.Errorf("%v", out.GetError())
				}
			}
			return out.GetCommit(), stream.CloseSend()
		},
	}
}

// TestARepeatedPutIsKnownBesideThoseOfNewerClients: messages are used again, and what this version does not know of one is no part of the
// next, whose hash would not be that of its first attempt.
func TestARepeatedPutIsKnownBesideThoseOfNewerClients(t *testing.T) {
	onBothTransports(t, func(t *testing.T, h *harness) {
		stream := h.pipeline(t, testContext(t))
		for name, send := range map[string]func(*pb.PutRequest) (*pb.PutResponse, error){
			"unary": func(r *pb.PutRequest) (*pb.PutResponse, error) { return h.kv.Put(testContext(t), r) },
			"pipelined": func(r *pb.PutRequest) (*pb.PutResponse, error) {
				mustSend(t, stream, &pb.PipelineRequest{Request: &pb.PipelineRequest_Put{Put: r}})
				out := mustRecv(t, stream)
				return out.GetPut(), status.FromProto(out.GetError()).Err()
			},
		} {
			id := newRequestID(t)
			for attempt := range 3 {
				if _, err := send(withUnknown(&pb.PutRequest{Key: []byte("other"), Value: []byte("v")})); err != nil {
					t.Fatal(err)
				}
				out, err := send(&pb.PutRequest{Key: []byte("k"), Value: []byte("v"), RequestId: id})
				if err != nil || out.Deduplicated != (attempt > 0) {
					t.Fatalf("%s: attempt %d: %v, %v", name, attempt, out, err)
				}
			}
		}
	})
}

// pipelined sends one request, and then one without an id, which must not get the id of the one before.
func pipelined(t testing.TB, h *harness, req *pb.PipelineRequest) (proto.Message, error) {
	stream, err := h.kv.Pipeline(testContext(t))
	if err != nil {
		return nil, err
	}
	plain := &pb.PipelineRequest{Id: 9, Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: []byte("plain"), Value: []byte("v")}}}
	var out proto.Message
	for _, req := range []*pb.PipelineRequest{req, plain} {
		if err := stream.Send(req); err != nil {
			return nil, err
		}
		answer, err := stream.Recv()
		switch {
		case err != nil:
			return nil, err
		case answer.GetError() != nil:
			return nil, fmt.Errorf("%v", answer.GetError())
		case req == plain && (answer.GetPut().GetEpoch() == 0 || answer.GetPut().GetDeduplicated()):
			t.Errorf("the put after it: %v", answer)
		case req != plain && answer.GetPut() != nil:
			out = answer.GetPut()
		case req != plain:
			out = answer.GetInvoke()
		}
	}
	return out, stream.CloseSend()
}

// TestEveryRequestIsExecutedOnce sends each request twice with one id, and once more with another: the second answer is the first
// one, and says so.
func TestEveryRequestIsExecutedOnce(t *testing.T) {
	h := mustStart(t)
	for i := range 3 {
		h.put(t, fmt.Sprint("range", i), "v")
	}
	h.put(t, "delete", "v")
	txns := pb.NewTransactionServiceClient(h.conn)
	for name, send := range identified(h, t) {
		t.Run(name, func(t *testing.T) {
			id := newRequestID(t)
			first, err := send(id)
			if err != nil {
				t.Fatal(err)
			}
			again, err := send(id)
			if err != nil {
				t.Fatalf("the second attempt: %v", err)
			}
			fields := again.ProtoReflect()
			flag := fields.Descriptor().Fields().ByName("deduplicated")
			if !fields.Get(flag).Bool() {
				t.Fatalf("the second answer does not say that it is the first one: %v", again)
			}
			fields.Clear(flag)
			if !proto.Equal(first, again) {
				t.Fatalf("the second answer is %v, the first was %v", again, first)
			}
			epoch := fields.Get(fields.Descriptor().Fields().ByName("epoch")).Uint()
			out, err := txns.GetOutcome(testContext(t), &pb.GetOutcomeRequest{RequestId: id})
			if err != nil || out.State != pb.OutcomeState_OUTCOME_STATE_APPLIED || out.Epoch != epoch {
				t.Fatalf("the outcome is %v, %v; the epoch %d", out, err, epoch)
			}
		})
	}
	if n := h.admission.deduplicated.Load(); n == 0 {
		t.Error("the metric counts nothing")
	}
}

func TestWrongRequestIDsAreRefusedAndExecuteNothing(t *testing.T) {
	h := mustStart(t)
	put := func(id []byte, value string) error {
		_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: []byte(value), RequestId: id})
		return err
	}
	failureOf(t, put([]byte("short"), "v")).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	random := uuid.New()
	failureOf(t, put(random[:], "v")).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	future := newRequestID(t)
	ahead := time.Now().Add(6 * time.Minute).UnixMilli()
	for i := range 6 {
		future[i] = byte(ahead >> (8 * (5 - i)))
	}
	failureOf(t, put(future, "v")).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE, "server_time")
	_, err := pb.NewTransactionServiceClient(h.conn).GetOutcome(testContext(t), &pb.GetOutcomeRequest{RequestId: future, Fence: true})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_REQUEST_ID_IN_FUTURE, "server_time")
	if h.get(t, "k").Found {
		t.Fatal("a refused request was executed")
	}
	id := newRequestID(t)
	if err := put(id, "v"); err != nil {
		t.Fatal(err)
	}
	failureOf(t, put(id, "other")).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_REQUEST_ID_REUSED)
	if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("k"), RequestId: id}); err == nil {
		t.Fatal("another kind of request with the id was accepted")
	}
	if string(h.get(t, "k").Value) != "v" {
		t.Fatal("a refused request was executed")
	}
	// The same request with another durability is the same request.
	out, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), RequestId: id, Durability: pb.Durability_DURABILITY_ASYNC})
	if err != nil || !out.Deduplicated {
		t.Fatalf("%v, %v", out, err)
	}
}

// TestNoRequestTakesTheOutcomeOfAnother: whatever has executed an id, a request of another kind with the same id is refused, and executes nothing.
func TestNoRequestTakesTheOutcomeOfAnother(t *testing.T) {
	h := mustStart(t)
	h.put(t, "range", "v")
	h.put(t, "plain", "v")
	kinds := identified(h, t)
	for first, executed := range kinds {
		id := newRequestID(t)
		if _, err := executed(id); err != nil {
			t.Fatalf("%s: %v", first, err)
		}
		before := h.contents(t)
		for second, other := range kinds {
			out, err := other(id)
			if reason := fmt.Sprint(err, status.Convert(err).Proto()); first != second && !strings.Contains(reason, "REQUEST_ID_REUSED") {
				t.Errorf("%s with the id of %s: %v, %v", second, first, out, err)
			}
		}
		if after := h.contents(t); !maps.Equal(after, before) {
			t.Errorf("after %s others with its id changed %v to %v", first, before, after)
		}
	}
}

func TestFencedRequestIsRefused(t *testing.T) {
	h := mustStart(t)
	txns := pb.NewTransactionServiceClient(h.conn)
	id := newRequestID(t)
	ask := func(fence bool, want pb.OutcomeState) {
		t.Helper()
		out, err := txns.GetOutcome(testContext(t), &pb.GetOutcomeRequest{RequestId: id, Fence: fence})
		if err != nil || out.State != want {
			t.Fatalf("%v, %v; want %v", out, err, want)
		}
	}
	ask(false, pb.OutcomeState_OUTCOME_STATE_NOT_APPLIED)
	ask(true, pb.OutcomeState_OUTCOME_STATE_CANCELLED)
	ask(true, pb.OutcomeState_OUTCOME_STATE_CANCELLED)
	_, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), RequestId: id})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_REQUEST_CANCELLED)
	if h.get(t, "k").Found {
		t.Fatal("a cancelled request was executed")
	}
}

// TestRepeatedRequestIsAnsweredAsDurableAsItAsks: the first attempt was ASYNC, and no sync of the log ends. The second one, which is
// SYNC, has no answer, and neither has GetOutcome, because a crash could take the write back.
func TestRepeatedRequestIsAnsweredAsDurableAsItAsks(t *testing.T) {
	h := mustStart(t)
	h.put(t, "before", "v")
	until := make(chan struct{})
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until})
	release := sync.OnceFunc(func() {
		rule.Remove()
		close(until)
	})
	t.Cleanup(release)
	id := newRequestID(t)
	put := func(ctx context.Context, d pb.Durability) (*pb.PutResponse, error) {
		return h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), RequestId: id, Durability: d})
	}
	if _, err := put(testContext(t), pb.Durability_DURABILITY_ASYNC); err != nil {
		t.Fatal(err)
	}
	if out, err := put(testContext(t), pb.Durability_DURABILITY_ASYNC); err != nil || !out.Deduplicated {
		t.Fatalf("%v, %v", out, err)
	}
	for name, ask := range map[string]func(ctx context.Context) error{
		"SYNC": func(ctx context.Context) error {
			_, err := put(ctx, pb.Durability_DURABILITY_SYNC)
			return err
		},
		"GetOutcome": func(ctx context.Context) error {
			_, err := pb.NewTransactionServiceClient(h.conn).GetOutcome(ctx, &pb.GetOutcomeRequest{RequestId: id})
			return err
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if err := ask(ctx); status.Code(err) != codes.DeadlineExceeded {
			t.Errorf("%s, before the write is durable: %v", name, err)
		}
		cancel()
	}
	release()
	if out, err := put(testContext(t), pb.Durability_DURABILITY_SYNC); err != nil || !out.Deduplicated {
		t.Fatalf("%v, %v", out, err)
	}
}

// TestOutcomesNameTheirHistory: each answer says of which history it is, the same one after a restart, and another one in
// another store, which knows nothing of the requests of the first.
func TestOutcomesNameTheirHistory(t *testing.T) {
	disk, id := vfs.NewMem(), newRequestID(t)
	outcome := func(h *harness, id []byte, fence bool, want pb.OutcomeState) string {
		t.Helper()
		out, err := pb.NewTransactionServiceClient(h.conn).GetOutcome(testContext(t), &pb.GetOutcomeRequest{RequestId: id, Fence: fence})
		if err != nil || out.State != want {
			t.Fatalf("%v, %v; want %v", out, err, want)
		}
		return string(out.Lineage)
	}
	first := mustStartOn(t, disk)
	lineage := outcome(first, id, false, pb.OutcomeState_OUTCOME_STATE_NOT_APPLIED)
	if len(lineage) != 16 {
		t.Errorf("a lineage of %d bytes", len(lineage))
	}
	if _, err := first.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), RequestId: id}); err != nil {
		t.Fatal(err)
	}
	if got := outcome(first, newRequestID(t), true, pb.OutcomeState_OUTCOME_STATE_CANCELLED); got != lineage {
		t.Errorf("lineage %x after %x", got, lineage)
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	if got := outcome(mustStartOn(t, disk), id, false, pb.OutcomeState_OUTCOME_STATE_APPLIED); got != lineage {
		t.Errorf("lineage %x after a restart, %x before", got, lineage)
	}
	if got := outcome(mustStart(t), id, false, pb.OutcomeState_OUTCOME_STATE_NOT_APPLIED); got == lineage {
		t.Errorf("two stores have the lineage %x", got)
	}
}

// TestReadingARequestIDAllocatesNothing, nor does hashing what the request asks for.
func TestReadingARequestIDAllocatesNothing(t *testing.T) {
	h := mustStart(t)
	c, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	defer c.release()
	put := &pb.PutRequest{Key: []byte("key"), Value: make([]byte, 100), RequestId: newRequestID(t), Durability: pb.Durability_DURABILITY_SYNC}
	n := testing.AllocsPerRun(100, func() {
		if r, err := c.toRequest(put, recordPut); err != nil || r == nil {
			t.Fatal(r, err)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}

package server

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestDeadlinesOverTheWire: every way to write sets, keeps or removes a deadline as documented, and every way to read shows
// it. A repeated request keeps the deadline of its first attempt, and a condition that fails sets none.
func TestDeadlinesOverTheWire(t *testing.T) {
	h := mustStart(t)
	ctx, kv, txns := testContext(t), h.kv, pb.NewTransactionServiceClient(h.conn)
	pipeline := h.pipeline(t, ctx)
	at := uint64(time.Now().Add(time.Hour).UnixMilli())
	key, value := []byte("k"), []byte("1")
	put := func(key []byte) *pb.Mutation {
		return &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key, Value: value, ExpiresAtMs: at}
	}
	invoke := func(i *pb.Invocation) error {
		i.Key = key
		_, err := kv.Invoke(ctx, &pb.InvokeRequest{Invocation: i})
		return err
	}
	for _, step := range []struct {
		name string
		do   func() error
		want uint64
	}{
		{"put", func() error {
			_, err := kv.Put(ctx, &pb.PutRequest{Key: key, Value: value, ExpiresAtMs: at})
			return err
		}, at},
		{"plain put", func() error { h.put(t, "k", "1"); return nil }, 0},
		{"batch", func() error {
			_, err := kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: []*pb.Mutation{put(key), put([]byte("k2"))}})
			return err
		}, at},
		{"increment", func() error { return invoke(increment("k", 1)) }, at},
		{"touch", func() error {
			return invoke(&pb.Invocation{Operation: &pb.Invocation_Touch{Touch: true}, ExpiresAtMs: at + 5})
		}, at + 5},
		{"persist", func() error { return invoke(&pb.Invocation{Operation: &pb.Invocation_Persist{Persist: true}}) }, 0},
		{"execute that only writes", func() error {
			_, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: []*pb.Operation{{Operation: &pb.Operation_Write{Write: put(key)}}}})
			return err
		}, at},
		{"execute", func() error {
			_, err := txns.Execute(ctx, &pb.ExecuteRequest{ThenOperations: []*pb.Operation{
				{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: key}}},
				{Operation: &pb.Operation_Invoke{Invoke: &pb.Invocation{Key: key, Operation: &pb.Invocation_Touch{Touch: true}, ExpiresAtMs: at + 7}}},
			}})
			return err
		}, at + 7},
		{"get and set", func() error { return invoke(&pb.Invocation{Operation: &pb.Invocation_GetAndSet{GetAndSet: value}}) }, 0},
		{"pipeline", func() error { return pipelinePut(h, t, &pb.PutRequest{Key: key, Value: value, ExpiresAtMs: at}) }, at},
		{"pipeline without", func() error { return pipelinePut(h, t, &pb.PutRequest{Key: key, Value: value}) }, 0},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		if got := h.get(t, "k").ExpiresAtMs; got != step.want {
			t.Errorf("%s: the deadline is %d, want %d", step.name, got, step.want)
		}
		mustSend(t, pipeline, getRequest(1, "k"))
		if got := mustRecv(t, pipeline).GetGet(); got.GetExpiresAtMs() != step.want {
			t.Errorf("%s: a pipeline answers %v, want the deadline %d", step.name, got, step.want)
		}
		many, err := kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: [][]byte{[]byte("missing"), key}})
		if err != nil || many.Results[0].ExpiresAtMs != 0 || many.Results[1].ExpiresAtMs != step.want {
			t.Errorf("%s: BatchGet has %v, %v", step.name, many, err)
		}
		stream, err := kv.Scan(ctx, &pb.ScanRequest{KeysOnly: true, Limit: 1})
		if err != nil {
			t.Fatal(err)
		}
		if pages := mustRecvAll(t, stream); pages[0].Entries[0].ExpiresAtMs != step.want {
			t.Errorf("%s: Scan has %v", step.name, pages)
		}
	}

	request := &pb.PutRequest{Key: key, Value: value, TtlMs: 60_000, RequestId: newRequestID(t)}
	for attempt := range 2 {
		answer, err := kv.Put(ctx, request)
		if err != nil || answer.Deduplicated != (attempt == 1) {
			t.Fatalf("attempt %d: %v, %v", attempt, answer, err)
		}
	}
	first := h.get(t, "k").ExpiresAtMs
	request = &pb.PutRequest{Key: key, TtlMs: 90_000, Preconditions: []*pb.Precondition{{Key: key, Condition: &pb.Precondition_Exists{}}}}
	if _, err := kv.Put(ctx, request); err == nil || h.get(t, "k").ExpiresAtMs != first {
		t.Errorf("a put whose condition fails has set a deadline: %v", err)
	}
}

// pipelinePut puts through a pipeline.
func pipelinePut(h *harness, t testing.TB, put *pb.PutRequest) error {
	stream, err := h.kv.Pipeline(testContext(t))
	if err != nil {
		return err
	}
	if err := stream.Send(&pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Put{Put: put}}); err != nil {
		return err
	}
	answer, err := stream.Recv()
	if err != nil || answer.GetPut() == nil {
		return fmt.Errorf("%v, %w", answer, err)
	}
	return stream.CloseSend()
}

// TestWrongLifetimesAreRefused with a reason of their own, and write nothing.
func TestWrongLifetimesAreRefused(t *testing.T) {
	h := mustStart(t)
	ctx, far := testContext(t), uint64(time.Now().Add(ttlMax).UnixMilli())+3_600_000
	refused := func(err error) {
		t.Helper()
		failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_TTL)
	}
	for _, put := range []*pb.PutRequest{
		{TtlMs: 999}, {TtlMs: uint64(ttlMax/time.Millisecond) + 1}, {TtlMs: 1 << 63}, {ExpiresAtMs: far}, {ExpiresAtMs: 1 << 63}, {TtlMs: 1000, ExpiresAtMs: 1},
	} {
		put.Key = []byte("k")
		_, err := h.kv.Put(ctx, put)
		refused(err)
		_, err = h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: []*pb.Mutation{
			{Kind: pb.Mutation_KIND_PUT, Key: put.Key, TtlMs: put.TtlMs, ExpiresAtMs: put.ExpiresAtMs},
		}})
		refused(err)
	}
	_, err := h.kv.BatchWrite(ctx, &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_DELETE, Key: []byte("k"), TtlMs: 1000}}})
	refused(err)
	for _, i := range []*pb.Invocation{
		{Operation: &pb.Invocation_Touch{Touch: true}},
		{Operation: &pb.Invocation_Persist{Persist: true}, TtlMs: 1000},
		{Operation: &pb.Invocation_GetAndDelete{GetAndDelete: true}, TtlMs: 1000},
	} {
		i.Key = []byte("k")
		_, err := h.kv.Invoke(ctx, &pb.InvokeRequest{Invocation: i})
		refused(err)
	}
	if h.get(t, "k").Found {
		t.Error("a refused request has written")
	}
}

// TestKeysExpireOverTheWire, with both transports.
func TestKeysExpireOverTheWire(t *testing.T) {
	for name, transport := range map[string]func(*config.Config){"direct": withDirect, "grpc-go": func(c *config.Config) { c.Transport = config.TransportGRPC }} {
		t.Run(name, func(t *testing.T) {
			h := mustStart(t, transport)
			past := uint64(time.Now().UnixMilli()) - 1
			if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), ExpiresAtMs: past}); err != nil {
				t.Fatal(err)
			}
			eventually(t, "the key to expire", func() bool { return !h.get(t, "k").Found })
		})
	}
}

package server

import (
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestWhatWritesAnswerIsCountedBeforeTheyCommit: the new values that a write returns, or very many outcomes, are refused while the share of
// answers has no room, and then nothing is written. Otherwise a few connections that read nothing could keep the share full.
func TestWhatWritesAnswerIsCountedBeforeTheyCommit(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.Limits.InflightBytes = 64 * config.MiB })
	kv, txn, ctx := h.kv, pb.NewTransactionServiceClient(h.conn), testContext(t)
	set := func(key string, size int, returns bool) *pb.Invocation {
		return &pb.Invocation{Key: []byte(key), Operation: &pb.Invocation_GetAndSet{GetAndSet: make([]byte, size)}, ReturnNew: returns}
	}
	invoke := func(in *pb.Invocation) error {
		_, err := kv.Invoke(ctx, &pb.InvokeRequest{Invocation: in})
		return err
	}
	invokeAll := func(n, size int, returns bool) error {
		req := new(pb.InvokeAllRequest)
		for i := range n {
			req.Invocations = append(req.Invocations, set(fmt.Sprint("k", i), size, returns))
		}
		_, err := kv.InvokeAll(ctx, req)
		return err
	}
	const large, small = 100 << 10, 30 << 10
	h.put(t, "there", string(make([]byte, small)))
	free := h.fillShare(shareAnswers, 0)
	for _, c := range []struct {
		name    string
		refused bool
		run     func() error
	}{
		{"Invoke", true, func() error { return invoke(set("k0", large, true)) }},
		{"Invoke in a transaction", true, func() error {
			return inTransaction(ctx, txn, &pb.TransactRequest{Request: &pb.TransactRequest_Invoke{Invoke: set("k0", large, true)}})
		}},
		{"Execute", true, func() error {
			invoke := &pb.Operation{Operation: &pb.Operation_Invoke{Invoke: set("k0", large, true)}}
			_, err := txn.Execute(ctx, &pb.ExecuteRequest{ThenOperations: []*pb.Operation{invoke}})
			return err
		}},
		{"InvokeAll of small values", true, func() error { return invokeAll(3, small, true) }},
		{"InvokeAll of many keys", true, func() error { return invokeAll(1500, 0, false) }},
		{"Execute of many writes", true, func() error {
			req := new(pb.ExecuteRequest)
			for i := range 20_000 {
				req.ThenOperations = append(req.ThenOperations, putOperation(fmt.Sprint("k", i), ""))
			}
			_, err := txn.Execute(ctx, req)
			return err
		}},
		{"InvokeAll that does not apply and returns the value twice", true, func() error {
			absent := &pb.Invocation{Key: []byte("there"), Operation: &pb.Invocation_PutIfAbsent{}, ReturnOld: true, ReturnNew: true}
			other := set("k1", 10<<10, true)
			_, err := kv.InvokeAll(ctx, &pb.InvokeAllRequest{Invocations: []*pb.Invocation{absent, other}})
			return err
		}},
		{"Invoke that returns no value", false, func() error { return invoke(set("other", large, false)) }},
		{"Invoke that returns a small value", false, func() error { return invoke(set("second", small, true)) }},
		{"InvokeAll that does not apply", false, func() error {
			absent := &pb.Invocation{Key: []byte("there"), Operation: &pb.Invocation_PutIfAbsent{}, ReturnNew: true}
			_, err := kv.InvokeAll(ctx, &pb.InvokeAllRequest{Invocations: []*pb.Invocation{absent, set("third", small, true)}})
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if err := c.run(); c.refused {
				failureOf(t, err).want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED)
			} else if err != nil {
				t.Error(err)
			}
			for _, key := range []string{"k0", "k1"} {
				if h.get(t, key).Found {
					t.Error("it is refused, and has written")
				}
			}
		})
	}
	free()
	if err := invokeAll(3, large, true); err != nil {
		t.Errorf("with room: %v", err)
	}
	eventually(t, "all answers are sent", func() bool { _, _, answers := h.admission.inflight(); return answers == 0 })
}

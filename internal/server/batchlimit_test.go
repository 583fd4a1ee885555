package server

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// TestBatchLimitCountsKeysAndValues: a batch whose keys and values are exactly as long as the limit
// is accepted, in one operation or in many, and one byte more is refused with the limit's own
// error, not the transport's.
func TestBatchLimitCountsKeysAndValues(t *testing.T) {
	const limit = config.MiB
	h := mustStart(t, func(c *config.Config) { c.Limits.BatchSize, c.Limits.ValueSize = limit, limit })
	for _, operations := range []int{1, 2, 1000, 20_000} {
		for _, excess := range []int{0, 1} {
			var batch pb.BatchWriteRequest
			left := int(limit) + excess
			for i := range operations {
				m := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "%d/%06d", operations, i)}
				size := left / (operations - i)
				m.Value = make([]byte, size-len(m.Key))
				left -= size
				batch.Mutations = append(batch.Mutations, m)
			}
			_, err := h.kv.BatchWrite(testContext(t), &batch)
			if excess == 0 {
				if err != nil {
					t.Errorf("%d operations at the limit: %v", operations, err)
				}
				continue
			}
			failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")
		}
	}
}

// TestManyInvocationsCountTheirOperations: an InvokeAll of many operations, or a transaction in one request, is refused as a batch that is too large, although
// its keys and values are not, and the message says what counts.
func TestManyInvocationsCountTheirOperations(t *testing.T) {
	const n, size = 5000, config.MiB
	h := mustStart(t, func(c *config.Config) {
		c.Limits.BatchSize, c.Limits.ValueSize, c.Limits.BatchOps = size, size, n // 3 x 1 MiB are less than 896 bytes for each operation
	})
	most := config.OperationBytes * n / 3
	key := func(i int) []byte { return fmt.Appendf(nil, "key %04d", i) }
	left := most - n*2*len(key(0)) - (n-mvcc.InvokeOperationsFree)*mvcc.InvokeOperationBytes // of values
	request := func(values int) (all *pb.InvokeAllRequest, execute *pb.ExecuteRequest) {
		all, execute = new(pb.InvokeAllRequest), new(pb.ExecuteRequest)
		for i := range n {
			value := make([]byte, values/(n-i))
			values -= len(value)
			in := &pb.Invocation{Key: key(i), Operation: &pb.Invocation_GetAndSet{GetAndSet: value}}
			all.Invocations = append(all.Invocations, in)
			execute.ThenOperations = append(execute.ThenOperations, &pb.Operation{Operation: &pb.Operation_Invoke{Invoke: in}})
		}
		return all, execute
	}
	refused := func(err error) {
		t.Helper()
		failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")
		if !strings.Contains(err.Error(), "are for operations (175 for each beyond 1000)") {
			t.Errorf("the message does not say what counts: %v", err)
		}
		if h.get(t, string(key(0))).Found {
			t.Error("what is refused has written")
		}
	}
	ctx, txn := testContext(t), pb.NewTransactionServiceClient(h.conn)
	if left > int(size)-n*len(key(0)) {
		t.Fatalf("%d bytes of values are more than a batch may have", left)
	}
	all, execute := request(left + 1)
	_, err := h.kv.InvokeAll(ctx, all)
	refused(err)
	_, err = txn.Execute(ctx, execute)
	refused(err)
	all, _ = request(left)
	if _, err = h.kv.InvokeAll(ctx, all); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	_, execute = request(left / 4)
	if _, err = txn.Execute(ctx, execute); err != nil {
		t.Errorf("a transaction of short values: %v", err)
	}
}

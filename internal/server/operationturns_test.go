package server

import (
	"fmt"
	"slices"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestOperationsOfTransactionsLetOthersRun: however many operations, keys, entries or mutations a request has.
func TestOperationsOfTransactionsLetOthersRun(t *testing.T) {
	const count = 10_000
	h := mustStart(t)
	var batch pb.BatchWriteRequest
	for i := range count {
		batch.Mutations = append(batch.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "key %d", i)})
	}
	_, err := h.kv.BatchWrite(testContext(t), &batch)
	must(t, err)
	key := []byte("k")
	for name, c := range map[string]struct {
		do    func(*mvcc.Txn, *executor) error
		turns int64
	}{
		"operations": {func(txn *mvcc.Txn, e *executor) error {
			list := slices.Repeat(operations(getOperation("k")), count)
			return (&txnService{Server: h.Server}).operate(t.Context(), e, txn, list, "then_operations", new(pb.ExecuteResponse))
		}, count * operationFrames / 64},
		"keys": {func(txn *mvcc.Txn, e *executor) error {
			_, err := txnBatchGet(t.Context(), txn, &pb.BatchReadRequest{Keys: slices.Repeat([][]byte{key}, count)}, &h.limits, e.admitGrowing)
			return err
		}, count / 64},
		"entries": {func(txn *mvcc.Txn, e *executor) error {
			out, err := txnScan(t.Context(), txn, &pb.RangeReadRequest{PageBytes: scanPageBytesMax}, e.admitGrowing)
			if err == nil && len(out.Entries) < count {
				t.Errorf("%d entries", len(out.Entries))
			}
			return err
		}, count / txnScanSteps},
		"mutations": {func(txn *mvcc.Txn, _ *executor) error {
			put := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key}
			_, err := txnWriteAll(txn, &pb.WriteRequest{Mutations: slices.Repeat([]*pb.Mutation{put}, count)})
			return err
		}, count / 64},
	} {
		t.Run(name, func(t *testing.T) {
			e, err := h.takeExecutor()
			must(t, err)
			defer e.release()
			e.access = h.authorized(t, pb.TransactionService_Execute_FullMethodName)
			txn, err := e.session.Begin(mvcc.TxnOptions{})
			must(t, err)
			defer txn.Rollback()
			if turns := testseed.TurnsBeside(func() { must(t, c.do(txn, e)) }); turns < c.turns/2 {
				t.Errorf("others ran %d times, want %d", turns, c.turns)
			}
		})
	}
}

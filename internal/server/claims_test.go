//go:build invariants

package server

import (
	"context"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// claimedRow is a request that touches everything that it names.
type claimedRow struct {
	method  string
	request any
	call    func(context.Context, *harness) error
}

// claimed is a request that its handler executes in the goroutine of the test.
func claimed[In, Out any](method string, in In, of func(*harness) func(context.Context, In) (Out, error)) claimedRow {
	return claimedRow{method, in, func(ctx context.Context, h *harness) error {
		_, err := of(h)(ctx, in)
		return err
	}}
}

func present(key string) *pb.Precondition {
	return &pb.Precondition{Key: []byte(key), Condition: &pb.Precondition_Exists{Exists: true}}
}

// branches is a transaction that reads, counts and changes in the branch that its condition chooses.
func branches(condition *pb.Precondition, then bool) *pb.ExecuteRequest {
	list := []*pb.Operation{
		{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: []byte("k1")}}},
		{Operation: &pb.Operation_Scan{Scan: &pb.RangeReadRequest{Range: prefixRange("k2")}}},
		{Operation: &pb.Operation_Write{Write: mutation("k3", 0)}},
		{Operation: &pb.Operation_Invoke{Invoke: appended("k4")}},
		{Operation: &pb.Operation_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{Range: prefixRange("k5")}}},
	}
	r := &pb.ExecuteRequest{Conditions: []*pb.TxnCondition{
		{Condition: &pb.TxnCondition_Key{Key: condition}},
		{Condition: &pb.TxnCondition_Range{Range: &pb.RangeCondition{Range: prefixRange("none"), Condition: &pb.RangeCondition_Empty{Empty: true}}}},
	}}
	if then {
		r.ThenOperations = list
	} else {
		r.Conditions = r.Conditions[:1]
		r.ElseOperations = list
	}
	return r
}

func claimedRows() []claimedRow {
	k := []byte("k1")
	conditions := []*pb.Precondition{present("k2")}
	execute := func(h *harness) func(context.Context, *pb.ExecuteRequest) (*pb.ExecuteResponse, error) {
		return (&txnService{Server: h.Server}).Execute
	}
	kv := func(h *harness) *kvService { return &kvService{Server: h.Server} }
	feed := func(h *harness) *feedService { return &feedService{Server: h.Server} }
	return []claimedRow{
		claimed(pb.KVService_Get_FullMethodName, &pb.GetRequest{Key: k}, func(h *harness) func(context.Context, *pb.GetRequest) (*pb.GetResponse, error) {
			return kv(h).Get
		}),
		claimed(pb.KVService_Put_FullMethodName, &pb.PutRequest{Key: k, Preconditions: conditions}, func(h *harness) func(context.Context, *pb.PutRequest) (*pb.PutResponse, error) {
			return kv(h).Put
		}),
		claimed(pb.KVService_Delete_FullMethodName, &pb.DeleteRequest{Key: k, Preconditions: conditions}, func(h *harness) func(context.Context, *pb.DeleteRequest) (*pb.DeleteResponse, error) {
			return kv(h).Delete
		}),
		claimed(pb.KVService_BatchGet_FullMethodName, &pb.BatchGetRequest{Keys: [][]byte{k, []byte("k3")}}, func(h *harness) func(context.Context, *pb.BatchGetRequest) (*pb.BatchGetResponse, error) {
			return kv(h).BatchGet
		}),
		claimed(pb.KVService_BatchWrite_FullMethodName, &pb.BatchWriteRequest{
			Mutations:     []*pb.Mutation{mutation("k1", 0), {Kind: pb.Mutation_KIND_DELETE, Key: []byte("k3")}},
			Preconditions: conditions,
		}, func(h *harness) func(context.Context, *pb.BatchWriteRequest) (*pb.BatchWriteResponse, error) {
			return kv(h).BatchWrite
		}),
		claimed(pb.KVService_DeleteRange_FullMethodName, &pb.DeleteRangeRequest{Range: prefixRange("k1"), Preconditions: conditions}, func(h *harness) func(context.Context, *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error) {
			return kv(h).DeleteRange
		}),
		claimed(pb.KVService_Invoke_FullMethodName, &pb.InvokeRequest{Invocation: appended("k1"), Preconditions: conditions}, func(h *harness) func(context.Context, *pb.InvokeRequest) (*pb.InvokeResponse, error) {
			return kv(h).Invoke
		}),
		claimed(pb.KVService_InvokeAll_FullMethodName, &pb.InvokeAllRequest{
			Invocations: []*pb.Invocation{appended("k1"), appended("k3")}, Preconditions: conditions,
		}, func(h *harness) func(context.Context, *pb.InvokeAllRequest) (*pb.InvokeAllResponse, error) {
			return kv(h).InvokeAll
		}),
		claimed(pb.TransactionService_Execute_FullMethodName, branches(present("k6"), true), execute),
		claimed(pb.TransactionService_Execute_FullMethodName, branches(absent("k6"), false), execute),
		claimed(pb.FeedService_History_FullMethodName, &pb.HistoryRequest{Key: k}, func(h *harness) func(context.Context, *pb.HistoryRequest) (*pb.HistoryResponse, error) {
			return feed(h).History
		}),
		claimed(pb.FeedService_History_FullMethodName, &pb.HistoryRequest{Range: prefixRange("k")}, func(h *harness) func(context.Context, *pb.HistoryRequest) (*pb.HistoryResponse, error) {
			return feed(h).History
		}),
		claimed(pb.FeedService_Diff_FullMethodName, &pb.DiffRequest{Range: prefixRange("k"), FromEpoch: 1}, func(h *harness) func(context.Context, *pb.DiffRequest) (*pb.DiffResponse, error) {
			return feed(h).Diff
		}),
	}
}

// without is a row whose footprint function leaves out one of the keys and ranges that a request names. It tells how many there are.
func without(row *rpcRow, left int, count *int) *rpcRow {
	planted := *row
	planted.footprint = func(f *footprint, request any) {
		*count = 0
		row.footprint(&footprint{collect: func(right auth.Right, r auth.Range) {
			if *count != left {
				f.add(right, r)
			}
			*count++
		}}, request)
	}
	return &planted
}

// Whatever a footprint function leaves out is found when the request is executed, and nothing is found if it leaves nothing out.
func TestEveryKeyThatAFootprintLeavesOutIsFound(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, row := range claimedRows() {
		for left, count := -1, 0; left < count; left++ {
			h := mustStartUnchecked(t, vfs.NewMem())
			for _, key := range []string{"k1", "k2", "k3", "k4", "k5", "k6"} {
				h.put(t, key, "1")
			}
			found := 0
			a := &access{gate: &h.gate}
			a.claims.unnamed = func(*mvcc.Touch) { found++ }
			if err := a.check(without(rpcRows[row.method], left, &count), row.request); err != nil {
				t.Fatal(err)
			}
			err := row.call(withAccess(testContext(t), a), h)
			if p, waits := err.(*pending); waits { //nolint:errorlint // made by run, and returned as it is
				err = p.err
			}
			if err != nil {
				t.Fatalf("%s: %v", row.method, err)
			}
			if left < 0 && found > 0 {
				t.Errorf("%s touches %d keys that it has not named", row.method, found)
			}
			if left >= 0 && found == 0 {
				t.Errorf("%s: number %d of the keys that it names was left out, and not missed", row.method, left)
			}
			_ = h.stop()
		}
	}
}

// What a transaction has named stays named until the next one begins.
func TestATransactionNamesTheKeysOfAllItsOperations(t *testing.T) {
	a := &access{gate: new(gate)}
	check := func(r *pb.TransactRequest) {
		t.Helper()
		if err := a.check(transactRow, r); err != nil {
			t.Fatal(err)
		}
	}
	begin := &pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{}}}
	writes := func(key string) bool { return a.hasNamed(&mvcc.Touch{Lower: []byte(key), Single: true, Write: true}) }
	check(begin)
	check(&pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{mutation("k", 0)}}}})
	check(&pb.TransactRequest{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}})
	if !writes("k") || writes("l") {
		t.Error("a commit may write what the transaction has named, and nothing else")
	}
	if check(begin); writes("k") {
		t.Error("the next transaction may write what the one before has named")
	}
}

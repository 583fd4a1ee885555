package server

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
)

func keyCondition(key string, value string) *pb.TxnCondition {
	return &pb.TxnCondition{Condition: &pb.TxnCondition_Key{Key: &pb.Precondition{
		Key: []byte(key), Condition: &pb.Precondition_ValueEquals{ValueEquals: []byte(value)},
	}}}
}

func existsCondition(key string, exists bool) *pb.TxnCondition {
	return &pb.TxnCondition{Condition: &pb.TxnCondition_Key{Key: &pb.Precondition{
		Key: []byte(key), Condition: &pb.Precondition_Exists{Exists: exists},
	}}}
}

func epochCondition(key string, epoch uint64) *pb.TxnCondition {
	return &pb.TxnCondition{Condition: &pb.TxnCondition_Key{Key: &pb.Precondition{
		Key: []byte(key), Condition: &pb.Precondition_EpochEquals{EpochEquals: epoch},
	}}}
}

func emptyCondition(prefix string, empty bool) *pb.TxnCondition {
	return &pb.TxnCondition{Condition: &pb.TxnCondition_Range{Range: &pb.RangeCondition{
		Range: &pb.KeyRange{Prefix: []byte(prefix)}, Condition: &pb.RangeCondition_Empty{Empty: empty},
	}}}
}

func unchangedCondition(prefix string, since uint64) *pb.TxnCondition {
	return &pb.TxnCondition{Condition: &pb.TxnCondition_Range{Range: &pb.RangeCondition{
		Range: &pb.KeyRange{Prefix: []byte(prefix)}, Condition: &pb.RangeCondition_UnchangedSince{UnchangedSince: since},
	}}}
}

func putOperation(key, value string) *pb.Operation {
	return &pb.Operation{Operation: &pb.Operation_Write{Write: &pb.Mutation{
		Kind: pb.Mutation_KIND_PUT, Key: []byte(key), Value: []byte(value),
	}}}
}

func getOperation(key string) *pb.Operation {
	return &pb.Operation{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: []byte(key)}}}
}

func scanOperation(prefix string) *pb.Operation {
	return &pb.Operation{Operation: &pb.Operation_Scan{Scan: &pb.RangeReadRequest{Range: &pb.KeyRange{Prefix: []byte(prefix)}}}}
}

func invokeOperation(i *pb.Invocation) *pb.Operation {
	return &pb.Operation{Operation: &pb.Operation_Invoke{Invoke: i}}
}

func operations(o ...*pb.Operation) []*pb.Operation { return o }

func conditions(c ...*pb.TxnCondition) []*pb.TxnCondition { return c }

func (h *harness) execute(t testing.TB, req *pb.ExecuteRequest) *pb.ExecuteResponse {
	t.Helper()
	out, err := h.transactions().Execute(testContext(t), req)
	if err != nil {
		t.Fatalf("%v: %v", req, err)
	}
	return out
}

// Each kind of condition decides, alone and through both ways of executing (a read among the
// operations takes the second).
func TestConditionsDecideWhatIsExecuted(t *testing.T) {
	h := mustStart(t, retaining)
	first := h.put(t, "a", "1")
	mid := h.put(t, "p/x", "2")
	newest := h.put(t, "a", "3")
	gone := h.put(t, "q/x", "4")
	if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: []byte("q/x")}); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		condition *pb.TxnCondition
		holds     bool
	}{
		{keyCondition("a", "3"), true},
		{keyCondition("a", "1"), false},
		{keyCondition("missing", ""), false},
		{existsCondition("a", true), true},
		{existsCondition("a", false), false},
		{existsCondition("missing", false), true},
		{epochCondition("a", newest), true},
		{epochCondition("a", first), false},
		{emptyCondition("p/", true), false},
		{emptyCondition("p/", false), true},
		{emptyCondition("none/", true), true},
		{emptyCondition("q/", true), true},
		{unchangedCondition("p/", mid), true},
		{unchangedCondition("p/", mid-1), false},
		{unchangedCondition("q/", gone), false},   // deleted since
		{unchangedCondition("q/", gone-1), false}, // put and deleted since
		{unchangedCondition("", gone), false},
	}
	for i, c := range cases {
		for _, direct := range []bool{true, false} {
			mark := fmt.Sprintf("mark/%d/%v", i, direct)
			then := operations(putOperation(mark, "then"))
			if !direct {
				then = append(then, getOperation(mark))
			}
			out := h.execute(t, &pb.ExecuteRequest{
				Conditions: conditions(c.condition), ThenOperations: then,
				ElseOperations: operations(putOperation(mark, "else")),
			})
			want := map[bool]string{true: "then", false: "else"}[c.holds]
			if got := h.get(t, mark); out.Succeeded != c.holds || string(got.Value) != want || got.Epoch != out.Epoch {
				t.Errorf("%v, direct %v: succeeded %v, wrote %q at %d, answered %d", c.condition, direct, out.Succeeded, got.Value, got.Epoch, out.Epoch)
			}
		}
	}
	_, err := h.transactions().Execute(testContext(t), &pb.ExecuteRequest{Conditions: conditions(unchangedCondition("p/", 1<<40))})
	failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE, "epoch", "visible")
}

func TestOperationsSeeThoseBeforeThem(t *testing.T) {
	h := mustStart(t)
	h.put(t, "l/a", "1")
	h.put(t, "l/b", "2")
	out := h.execute(t, &pb.ExecuteRequest{ThenOperations: operations(
		getOperation("l/a"), putOperation("l/a", "10"), getOperation("l/a"), invokeOperation(increment("l/b", 3)),
		&pb.Operation{Operation: &pb.Operation_DeleteRange{DeleteRange: &pb.RangeDeleteRequest{
			Range: &pb.KeyRange{Start: []byte("l/a"), End: []byte("l/b")},
		}}},
		scanOperation("l/"),
	)})
	r := out.Results
	if len(r) != 6 || !out.Succeeded || out.Epoch != 3 {
		t.Fatalf("%v", out)
	}
	if a, b := r[0].GetGet(), r[2].GetGet(); string(a.Value) != "1" || string(b.Value) != "10" || a.ReadEpoch != 2 {
		t.Errorf("gets: %v, %v", a, b)
	}
	if i := r[3].GetInvoke(); string(i.Old) != "2" || string(i.New) != "5" || !i.Applied {
		t.Errorf("invoke: %v", i)
	}
	if n := r[4].GetDeleteRange().Deleted; n != 1 {
		t.Errorf("deleted %d", n)
	}
	if e := r[5].GetScan().Entries; len(e) != 1 || string(e[0].Key) != "l/b" || string(e[0].Value) != "5" {
		t.Errorf("scan: %v", e)
	}
	only := h.execute(t, &pb.ExecuteRequest{ThenOperations: operations(getOperation("l/b"))})
	if only.Epoch != 0 || string(only.Results[0].GetGet().Value) != "5" {
		t.Errorf("reads alone: %v", only)
	}
}

func TestAKeyWrittenTwiceTakesTheLastValue(t *testing.T) {
	h := mustStart(t)
	out := h.execute(t, &pb.ExecuteRequest{ThenOperations: operations(putOperation("k", "1"), putOperation("k", "2"))})
	if got := h.get(t, "k"); string(got.Value) != "2" || got.Epoch != out.Epoch || len(out.Results) != 2 {
		t.Errorf("%v, %v", got, out)
	}
}

func TestManyWritesHaveAResultEach(t *testing.T) {
	const many = 1000
	if n := testing.AllocsPerRun(1, func() { _ = wroteAll(many) }); n > many/10 || len(wroteAll(many)) != many {
		t.Errorf("%v pieces of memory for the results of %d writes", n, len(wroteAll(many)))
	}
	h := mustStart(t)
	for n := range 9 {
		var list []*pb.Operation
		for i := range n {
			list = append(list, putOperation(fmt.Sprintf("k%d", i), "v"))
		}
		if out := h.execute(t, &pb.ExecuteRequest{ThenOperations: list}); len(out.Results) != n || !out.Succeeded {
			t.Errorf("%d writes: %v", n, out)
		}
	}
}

func TestWhatExecuteRefuses(t *testing.T) {
	h := mustStart(t)
	h.put(t, "text", "x")
	bad := []struct {
		req    *pb.ExecuteRequest
		code   codes.Code
		reason pb.ErrorReason
	}{
		{&pb.ExecuteRequest{Conditions: conditions(new(pb.TxnCondition))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.ExecuteRequest{Conditions: conditions(keyCondition("", ""))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_EMPTY},
		{&pb.ExecuteRequest{Conditions: conditions(keyCondition("", "")), ThenOperations: operations(putOperation("k", "v"))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_EMPTY},
		{&pb.ExecuteRequest{Conditions: conditions(existsCondition("k", true), keyCondition("", ""))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_EMPTY},
		{&pb.ExecuteRequest{Conditions: conditions(&pb.TxnCondition{Condition: &pb.TxnCondition_Range{Range: new(pb.RangeCondition)}})}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RANGE},
		{&pb.ExecuteRequest{Conditions: conditions(unchangedCondition("p", 0))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.ExecuteRequest{ThenOperations: operations(new(pb.Operation))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.ExecuteRequest{ThenOperations: operations(putOperation("", "v"))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_KEY_EMPTY},
		{&pb.ExecuteRequest{ThenOperations: operations(putOperation("other", "v"), invokeOperation(increment("text", 1)))}, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TYPE_ERROR},
		{&pb.ExecuteRequest{Durability: 9, ThenOperations: operations(putOperation("k", "v"))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{&pb.ExecuteRequest{Durability: 9, ThenOperations: operations(getOperation("k"))}, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST},
	}
	for _, b := range bad {
		_, err := h.transactions().Execute(testContext(t), b.req)
		if f := failureOf(t, err); f.code != b.code || f.reason != b.reason.Reason() {
			t.Errorf("%v: got %v %s, want %v %s", b.req, f.code, f.reason, b.code, b.reason.Reason())
		}
	}
	if h.get(t, "other").Found {
		t.Error("a part of a failed request was executed")
	}
}

// TestWhatScansOfATransactionTakeIsLimited: an entry of a short key takes many times what is encoded of it. What the scans of one request return is limited
// with that, and counted as its answer.
func TestWhatScansOfATransactionTakeIsLimited(t *testing.T) {
	const entries, limit = 1000, 1 << 20
	for _, transport := range []config.Transport{config.TransportDirect, config.TransportGRPC} {
		h := mustStart(t, func(c *config.Config) {
			c.Transport, c.Limits.BatchSize, c.Limits.ValueSize = transport, limit, limit/2
		})
		var w pb.BatchWriteRequest
		for i := range entries {
			w.Mutations = append(w.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Appendf(nil, "s%x", i)})
		}
		if _, err := h.kv.BatchWrite(testContext(t), &w); err != nil {
			t.Fatal(err)
		}
		scans := slices.Repeat(operations(scanOperation("s")), 4)
		out := h.execute(t, &pb.ExecuteRequest{ThenOperations: scans})
		for _, r := range out.Results {
			if len(r.GetScan().GetEntries()) != entries {
				t.Fatalf("%s: %d entries", transport, len(r.GetScan().GetEntries()))
			}
		}
		if out.SizeVT() > limit/16 {
			t.Fatalf("%d bytes are encoded: their own limit could be what is tested", out.SizeVT())
		}
		_, err := h.transactions().Execute(testContext(t), &pb.ExecuteRequest{ThenOperations: append(scans, scans...)})
		failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_TOO_LARGE, "limit", "size", "unit")
	}
}

// Both ways of executing, plain puts and Invoke meet on one counter, and none is lost.
func TestNoIncrementIsLostWhicheverWayItTakes(t *testing.T) {
	h := mustStart(t)
	h.put(t, "n", "0")
	const clients, rounds = 8, 25
	var all sync.WaitGroup
	for n := range clients {
		all.Go(func() {
			for done := 0; done < rounds; {
				if n%2 == 0 { // reads among the operations
					h.execute(t, &pb.ExecuteRequest{ThenOperations: operations(invokeOperation(increment("n", 1)))})
					done++
					continue
				}
				old, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("n")})
				if err != nil {
					t.Error(err)
					return
				}
				v, _ := strconv.Atoi(string(old.Value))
				if h.execute(t, &pb.ExecuteRequest{
					Conditions: conditions(epochCondition("n", old.Epoch)), ThenOperations: operations(putOperation("n", strconv.Itoa(v+1))),
				}).Succeeded {
					done++
				}
			}
		})
	}
	all.Wait()
	if got := h.get(t, "n"); string(got.Value) != strconv.Itoa(clients*rounds) {
		t.Errorf("the counter is %q, want %d", got.Value, clients*rounds)
	}
}

func TestInvocationsReportWhatTheyDid(t *testing.T) {
	h := mustStart(t)
	h.put(t, "n", "5")
	low, high := int64(0), int64(10)
	cases := []struct {
		name string
		i    *pb.Invocation
		want string // applied, old, new, or the reason
	}{
		{"increment", &pb.Invocation{Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: 4}}}, "true 5 9"},
		{"past the bound", &pb.Invocation{Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: 2, Max: &high}}}, "TYPE_ERROR"},
		{"at the bound", &pb.Invocation{Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: 1, Max: &high}}}, "true 9 10"},
		{"below the bound", &pb.Invocation{Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: -11, Min: &low}}}, "TYPE_ERROR"},
		{"overflow", &pb.Invocation{Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Delta: math.MaxInt64}}}, "TYPE_ERROR"},
		{"bounds in disorder", &pb.Invocation{Operation: &pb.Invocation_Increment{Increment: &pb.Increment{Min: &high, Max: &low}}}, "INVALID_REQUEST"},
		{"min", &pb.Invocation{Operation: &pb.Invocation_Min{Min: -3}}, "true 10 -3"},
		{"max", &pb.Invocation{Operation: &pb.Invocation_Max{Max: 7}}, "true -3 7"},
		{"append", &pb.Invocation{Operation: &pb.Invocation_Append{Append: []byte("x")}}, "true 7 7x"},
		{"no number", &pb.Invocation{Operation: &pb.Invocation_Min{Min: 1}}, "TYPE_ERROR"},
		{"compare fails", &pb.Invocation{Operation: &pb.Invocation_CompareAndSet{CompareAndSet: &pb.CompareAndSet{Expect: []byte("y"), Value: []byte("z")}}}, "false 7x 7x"},
		{"compare holds", &pb.Invocation{Operation: &pb.Invocation_CompareAndSet{CompareAndSet: &pb.CompareAndSet{Expect: []byte("7x"), Value: []byte("z")}}}, "true 7x z"},
		{"not absent", &pb.Invocation{Operation: &pb.Invocation_PutIfAbsent{PutIfAbsent: []byte("w")}}, "false z z"},
		{"get and set", &pb.Invocation{Operation: &pb.Invocation_GetAndSet{GetAndSet: []byte("s")}}, "true z s"},
		{"get and delete", &pb.Invocation{Operation: &pb.Invocation_GetAndDelete{GetAndDelete: true}}, "true s -"},
		{"get and delete no more", &pb.Invocation{Operation: &pb.Invocation_GetAndDelete{}}, "INVALID_REQUEST"},
		{"absent", &pb.Invocation{Operation: &pb.Invocation_PutIfAbsent{PutIfAbsent: []byte("w")}}, "true - w"},
		{"nothing", &pb.Invocation{}, "INVALID_REQUEST"},
	}
	for _, c := range cases {
		c.i.Key, c.i.ReturnOld, c.i.ReturnNew = []byte("n"), true, true
		before := h.get(t, "n")
		out, err := h.kv.Invoke(testContext(t), &pb.InvokeRequest{Invocation: c.i})
		var got string
		if err != nil {
			got = failureOf(t, err).reason
			if after := h.get(t, "n"); after.Epoch != before.Epoch {
				t.Errorf("%s: an error wrote something", c.name)
			}
		} else {
			r := out.Result
			old, now := "-", "-"
			if r.OldFound {
				old = string(r.Old)
			}
			if r.NewFound {
				now = string(r.New)
			}
			got = strings.TrimSpace(fmt.Sprint(r.Applied, " ", old, " ", now))
			if (out.Epoch != 0) != r.Applied || r.OldEpoch != before.Epoch {
				t.Errorf("%s: epoch %d, old epoch %d (was %d)", c.name, out.Epoch, r.OldEpoch, before.Epoch)
			}
		}
		if got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
	}
}

func TestInvokeAllIsAllOrNothing(t *testing.T) {
	h := mustStart(t)
	h.put(t, "text", "x")
	out, err := h.kv.InvokeAll(testContext(t), &pb.InvokeAllRequest{Invocations: []*pb.Invocation{increment("a", 1), increment("b", 2)}})
	if err != nil || len(out.Results) != 2 || string(out.Results[1].New) != "2" || out.Epoch != 2 {
		t.Fatalf("%v, %v", out, err)
	}
	if a, b := h.get(t, "a"), h.get(t, "b"); a.Epoch != b.Epoch || a.Epoch != out.Epoch {
		t.Errorf("epochs %d and %d, answered %d", a.Epoch, b.Epoch, out.Epoch)
	}
	_, err = h.kv.InvokeAll(testContext(t), &pb.InvokeAllRequest{Invocations: []*pb.Invocation{increment("a", 1), increment("text", 2)}})
	f := failureOf(t, err)
	f.want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_TYPE_ERROR, "key", "index")
	if f.metadata["key"] != "text" || f.metadata["index"] != "1" {
		t.Errorf("the error names %v", f.metadata)
	}
	_, err = h.kv.InvokeAll(testContext(t), &pb.InvokeAllRequest{Invocations: []*pb.Invocation{increment("a", 1), increment("a", 2)}})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_DUPLICATE_KEY, "key")
	_, err = h.kv.InvokeAll(testContext(t), new(pb.InvokeAllRequest))
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_BATCH_EMPTY)
	_, err = h.kv.Invoke(testContext(t), &pb.InvokeRequest{Invocation: increment("a", 1), Preconditions: []*pb.Precondition{
		{Key: []byte("text"), Condition: &pb.Precondition_Exists{Exists: false}},
	}})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED, "key", "index", "condition", "epoch")
	if got := h.get(t, "a"); string(got.Value) != "1" {
		t.Errorf("a is %q", got.Value)
	}
}

func TestInvocationsGoThroughAPipeline(t *testing.T) {
	h := mustStart(t)
	stream := h.pipeline(t, testContext(t))
	const each = 50
	for i := range uint64(each) {
		mustSend(t, stream,
			&pb.PipelineRequest{Id: 3 * i, Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: increment("n", 1)}}},
			&pb.PipelineRequest{Id: 3*i + 1, Request: &pb.PipelineRequest_InvokeAll{InvokeAll: &pb.InvokeAllRequest{
				Invocations: []*pb.Invocation{increment("n", 1), increment("m", 1)},
			}}},
			getRequest(3*i+2, "n"))
	}
	seen := map[string]bool{}
	for range 3 * each {
		out := mustRecv(t, stream)
		switch out.Id % 3 {
		case 0:
			seen[string(out.GetInvoke().GetResult().GetNew())] = true
		case 1:
			if r := out.GetInvokeAll().GetResults(); len(r) == 2 {
				seen[string(r[0].New)] = true
			}
		case 2: // a read sees the writes sent before it
			if got, want := string(out.GetGet().GetValue()), strconv.FormatUint(2*(out.Id/3)+2, 10); got != want {
				t.Errorf("get %d sees %q, want %s", out.Id, got, want)
			}
		}
	}
	if len(seen) != 2*each || !seen[strconv.Itoa(2*each)] {
		t.Errorf("%d different sums of %d increments", len(seen), 2*each)
	}
	mustSend(t, stream, &pb.PipelineRequest{Id: 1, Request: &pb.PipelineRequest_Invoke{Invoke: new(pb.InvokeRequest)}})
	failureOf(t, status.FromProto(mustRecv(t, stream).GetError()).Err()).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
}

// TestReadsOfATransactionEndWithItsContext: there may be very many of them, and each may read a page.
func TestReadsOfATransactionEndWithItsContext(t *testing.T) {
	h := mustStart(t)
	c, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	defer c.release()
	c.access = h.authorized(t, pb.TransactionService_Execute_FullMethodName)
	txn, err := c.session.Begin(mvcc.TxnOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testContext(t))
	cancel()
	if _, err := txnBatchGet(ctx, txn, &pb.BatchReadRequest{Keys: [][]byte{[]byte("k")}}, &h.limits, c.admitGrowing); !errors.Is(err, context.Canceled) {
		t.Errorf("a batch of gets: %v", err)
	}
	err = (&txnService{Server: h.Server}).operate(ctx, c, txn, operations(getOperation("k")), "then_operations", new(pb.ExecuteResponse))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("operations: %v", err)
	}
}

package storm

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// Attacks with requests of as many operations as --max-batch-ops allows, of short keys and values. What such an operation takes is its records, not its
// bytes: one that sets a deadline has up to three, and counts as three.

const (
	manyOperations = 200_000            // --max-batch-ops
	manyDeadlines  = manyOperations / 3 // as many as may set a deadline
)

func manyKey(i int) []byte { return fmt.Appendf(nil, "a key that will expire %07d", i) }

// putMany writes --max-batch-ops keys with a time to live, in several batches, which the attacks change.
func (a *attacker) putMany() {
	for from := 0; from < manyOperations; from += manyDeadlines {
		a.call("a batch", "KVService/BatchWrite", manyMutations(from, min(from+manyDeadlines, manyOperations)))
	}
}

func manyMutations(from, to int) *pb.BatchWriteRequest {
	req := new(pb.BatchWriteRequest)
	for i := from; i < to; i++ {
		req.Mutations = append(req.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: manyKey(i), Value: make([]byte, 100), TtlMs: 3_600_000})
	}
	return req
}

func manyInvocations(n int, operation func(*pb.Invocation)) *pb.InvokeAllRequest {
	req := new(pb.InvokeAllRequest)
	for i := range n {
		invocation := &pb.Invocation{Key: manyKey(i)}
		operation(invocation)
		req.Invocations = append(req.Invocations, invocation)
	}
	return req
}

func touch(i *pb.Invocation) {
	i.Operation, i.TtlMs = &pb.Invocation_Touch{Touch: true}, 7_200_000
}

func touchAndGet(i *pb.Invocation) {
	touch(i)
	i.ReturnOld, i.ReturnNew = true, true
}

func persist(i *pb.Invocation) { i.Operation = &pb.Invocation_Persist{Persist: true} }

func exchange(i *pb.Invocation) {
	i.Operation, i.ReturnOld, i.ReturnNew = &pb.Invocation_GetAndSet{GetAndSet: make([]byte, 100)}, true, true
}

// call sends one request and waits for its answer, which it does not decode.
func (a *attacker) call(what, method string, request interface{ MarshalVT() ([]byte, error) }, refusals ...codes.Code) {
	a.atOnce(1, what, method, request, refusals...)
}

// atOnce sends a request over so many connections at once.
func (a *attacker) atOnce(connections int, what, method string, request interface{ MarshalVT() ([]byte, error) }, refusals ...codes.Code) {
	message, err := request.MarshalVT()
	if err != nil {
		a.Fatal(err)
	}
	var all sync.WaitGroup
	for range connections {
		conn := a.dial(grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encoded{}), grpc.MaxCallRecvMsgSize(1<<30)))
		all.Go(func() {
			var none []byte
			err := conn.Invoke(a.ctx, "/epochkv.v1."+method, &message, &none)
			if slices.Contains(refusals, status.Code(err)) {
				a.refused.Add(1)
				return
			}
			a.count(what, err)
		})
	}
	all.Wait()
}

// touches changes the deadlines of many keys, one request after the other, and then several at once. Requests with more than may set a deadline are
// refused.
func (a *attacker) touches() {
	a.putMany()
	a.call("a batch that is too large", "KVService/BatchWrite", manyMutations(0, manyOperations), codes.InvalidArgument)
	a.atOnce(a.times(1, 3), "touches that are too many", "KVService/InvokeAll", manyInvocations(manyOperations, touch), codes.InvalidArgument)
	for range a.times(1, 4) {
		a.call("touches", "KVService/InvokeAll", manyInvocations(manyDeadlines, touch))
	}
	a.atOnce(a.times(2, 3), "touches", "KVService/InvokeAll", manyInvocations(manyDeadlines, touch))
}

// unreadTouches is touches whose answers, which have the values, are not read.
func (a *attacker) unreadTouches() {
	a.putMany()
	a.begun(a.times(2, 6), a.times(2, 3), "KVService/InvokeAll", manyInvocations(manyDeadlines, touchAndGet))
	a.call("touches", "KVService/InvokeAll", manyInvocations(manyDeadlines, touch))
}

// replaceMany replaces and removes deadlines with operations that have none.
func (a *attacker) replaceMany(operation func(*pb.Invocation)) {
	for range a.times(1, 3) {
		a.putMany()
		a.atOnce(a.times(1, 3), "operations without deadlines", "KVService/InvokeAll", manyInvocations(manyOperations, operation))
	}
}

// repeatExchanges has two clients exchange many keys, again and again: the memtable and the log buffer of one exchange are there while the next one is
// received and executed. Each time the keys have deadlines before.
func (a *attacker) repeatExchanges() {
	req := manyInvocations(manyOperations, exchange)
	message, err := req.MarshalVT()
	if err != nil {
		a.Fatal(err)
	}
	for range a.times(1, 3) {
		a.putMany()
		end := time.Now().Add(time.Duration(a.times(2, 3)) * time.Second)
		var all sync.WaitGroup
		for range 2 {
			conn := a.dial(grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encoded{}), grpc.MaxCallRecvMsgSize(1<<30)))
			all.Go(func() {
				for time.Now().Before(end) && a.ctx.Err() == nil {
					var none []byte
					err := conn.Invoke(a.ctx, "/epochkv.v1.KVService/InvokeAll", &message, &none)
					if a.count("exchanges", err); err != nil {
						time.Sleep(10 * time.Millisecond)
					}
				}
			})
		}
		all.Wait()
	}
}

// repeatMany writes the same keys with deadlines again and again.
func (a *attacker) repeatMany() {
	for range a.times(1, 6) {
		a.atOnce(a.times(2, 3), "a batch", "KVService/BatchWrite", manyMutations(0, manyDeadlines))
	}
}

// executeMany puts keys with deadlines in transactions.
func (a *attacker) executeMany() {
	m := new(pb.ExecuteRequest)
	for _, i := range manyInvocations(manyDeadlines, touch).Invocations {
		m.ThenOperations = append(m.ThenOperations, &pb.Operation{Operation: &pb.Operation_Invoke{Invoke: i}})
	}
	a.putMany()
	for range a.times(1, 3) {
		a.atOnce(a.times(1, 3), "a transaction", "TransactionService/Execute", m, codes.Aborted)
	}
}

// manyValues is a request that has as much, or reads or writes as much, as an InvokeAll of so many operations may: see config.InvokeBytes.
type manyValues struct {
	operations int
	longer     int // of bytes by which the keys are longer
	old        int // bytes of each value that is there
	operand    int
	appends    bool // or exchanges
	returns    bool // both values
	execute    bool // in a transaction, in place of an InvokeAll
}

// largestMany are the largest values that so many operations may read, or write.
func largestMany(operations int) int {
	c := config.Default()
	return (int(c.InvokeBytes())-mvcc.InvokeOperationBytes*(operations-mvcc.InvokeOperationsFree))/operations - 2*len(manyKey(0))
}

// invokeMany exchanges many values, or appends to them.
func (a *attacker) invokeMany(m manyValues) {
	req := manyInvocations(m.operations, func(i *pb.Invocation) {
		i.Key = append(i.Key, make([]byte, m.longer)...)
		i.Operation, i.ReturnOld, i.ReturnNew = &pb.Invocation_GetAndSet{GetAndSet: make([]byte, m.operand)}, m.returns, m.returns
		if m.appends {
			i.Operation = &pb.Invocation_Append{Append: make([]byte, m.operand)}
		}
	})
	execute := new(pb.ExecuteRequest)
	for _, i := range req.Invocations {
		execute.ThenOperations = append(execute.ThenOperations, &pb.Operation{Operation: &pb.Operation_Invoke{Invoke: i}})
	}
	for range a.times(1, 3) {
		const most = 25_000 // of a batch
		for from := 0; from < m.operations; from += most {
			batch := new(pb.BatchWriteRequest)
			for i := from; i < min(from+most, m.operations); i++ {
				batch.Mutations = append(batch.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: req.Invocations[i].Key, Value: make([]byte, m.old)})
			}
			a.call("a batch", "KVService/BatchWrite", batch)
		}
		if m.execute {
			a.atOnce(a.times(1, 3), "a transaction", "TransactionService/Execute", execute, codes.Aborted)
			continue
		}
		a.atOnce(a.times(1, 3), "invocations", "KVService/InvokeAll", req)
	}
}

// TestLongKeysStayInTheBound: batches of the longest keys, which share nearly all of their bytes, so that a page has thousands of them.
//
//	go test ./internal/e2e/storm -run LongKeys -v -storm.attacks
func TestLongKeysStayInTheBound(t *testing.T) {
	const pageSize = 64 << 10
	kind := attack{"batches of the longest keys", func(a *attacker) {
		const keys = 3800 // 60 MiB
		puts, deletes := new(pb.BatchWriteRequest), new(pb.BatchWriteRequest)
		shared := bytes.Repeat([]byte("k"), pageSize/4-8)
		for i := range keys {
			key := fmt.Appendf(shared[:len(shared):len(shared)], "%08d", i)
			puts.Mutations = append(puts.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key})
			deletes.Mutations = append(deletes.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_DELETE, Key: key})
		}
		for range a.times(1, 3) {
			a.atOnce(a.times(1, 6), "puts", "KVService/BatchWrite", puts)
			a.atOnce(a.times(1, 6), "deletions", "KVService/BatchWrite", deletes)
		}
		a.steadyMemory()
	}}
	kind.against(t, mustBuild(t), "--page-size", strconv.Itoa(pageSize))
}

// executeBothLists has puts in both lists, and as many conditions as operations. With more puts than one list may have the request is refused.
func (a *attacker) executeBothLists() {
	request := func(puts int) *pb.ExecuteRequest {
		m := new(pb.ExecuteRequest)
		for i := range puts {
			o := &pb.Operation{Operation: &pb.Operation_Write{Write: &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: manyKey(i), Value: make([]byte, 100)}}}
			m.ThenOperations, m.ElseOperations = append(m.ThenOperations, o), append(m.ElseOperations, o)
		}
		for i := range manyOperations {
			absent := &pb.Precondition{Key: append(manyKey(i), "not there"...), Condition: &pb.Precondition_Exists{}}
			m.Conditions = append(m.Conditions, &pb.TxnCondition{Condition: &pb.TxnCondition_Key{Key: absent}})
		}
		return m
	}
	for range a.times(1, 3) {
		a.atOnce(a.times(1, 3), "a transaction", "TransactionService/Execute", request(manyOperations/2))
		a.atOnce(a.times(1, 3), "a transaction that is too large", "TransactionService/Execute", request(manyOperations), codes.InvalidArgument)
	}
}

// executeScans scans short keys again and again in one request, as often as it may and much more often.
func (a *attacker) executeScans() {
	const most = 4 << 20 / 32 // entries of a page
	for from := 0; from < most; from += most / 4 {
		m := new(pb.BatchWriteRequest)
		for i := from; i < from+most/4; i++ {
			m.Mutations = append(m.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: []byte{'!', byte(i >> 16), byte(i >> 8), byte(i)}})
		}
		a.call("a batch", "KVService/BatchWrite", m)
	}
	scan := &pb.Operation{Operation: &pb.Operation_Scan{Scan: &pb.RangeReadRequest{Range: &pb.KeyRange{Prefix: []byte{'!'}}, PageBytes: 4 << 20}}}
	for _, scans := range []int{2, 36} {
		a.atOnce(a.times(2, 6), "a transaction", "TransactionService/Execute", &pb.ExecuteRequest{ThenOperations: slices.Repeat([]*pb.Operation{scan}, scans)}, codes.InvalidArgument)
	}
}

// historiesOfLargeCommits asks again and again for the history of a key that was written in the largest batches, beside such batches.
func (a *attacker) historiesOfLargeCommits() {
	key := []byte("beside large values")
	batch := &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: key}}}
	for i := range 4 {
		batch.Mutations = append(batch.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: largeKey(i), Value: make([]byte, 14<<20)})
	}
	a.call("a batch", "KVService/BatchWrite", batch)
	var writing sync.WaitGroup
	writing.Go(func() {
		for range a.times(2, 8) {
			a.call("a batch", "KVService/BatchWrite", batch)
		}
	})
	a.unread(a.times(50, 300), a.times(20, 100), "FeedService/History", &pb.HistoryRequest{Key: key})
	writing.Wait()
	a.steadyMemory()
}

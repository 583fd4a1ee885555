package storm

import (
	"fmt"
	"sync"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// Attacks with requests of as many operations as --max-batch-ops allows, of keys of a few bytes that
// have a time to live. What such an operation takes is its records, not its bytes.

// manyOperations is --max-batch-ops.
const manyOperations = 200_000

func manyKey(i int) []byte { return fmt.Appendf(nil, "m%08d", i) }

// putMany writes so many keys with a time to live, which the attacks change.
func (a *attacker) putMany() {
	a.call("a batch", "KVService/BatchWrite", manyMutations(new(pb.BatchWriteRequest)))
}

func manyMutations(req *pb.BatchWriteRequest) *pb.BatchWriteRequest {
	for i := range manyOperations {
		req.Mutations = append(req.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: manyKey(i), Value: []byte("v"), TtlMs: 3_600_000})
	}
	req.Durability = pb.Durability_DURABILITY_ASYNC
	return req
}

func manyInvocations(operation func(*pb.Invocation)) *pb.InvokeAllRequest {
	req := &pb.InvokeAllRequest{Durability: pb.Durability_DURABILITY_ASYNC}
	for i := range manyOperations {
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

// call sends one request and waits for its answer, which it does not decode.
func (a *attacker) call(what, method string, request interface{ MarshalVT() ([]byte, error) }) {
	a.atOnce(1, what, method, request)
}

// atOnce sends a request over so many connections at once.
func (a *attacker) atOnce(connections int, what, method string, request interface{ MarshalVT() ([]byte, error) }) {
	message, err := request.MarshalVT()
	if err != nil {
		a.Fatal(err)
	}
	var all sync.WaitGroup
	for range connections {
		conn := a.dial(grpc.WithDefaultCallOptions(grpc.ForceCodecV2(encoded{}), grpc.MaxCallRecvMsgSize(1<<30)))
		all.Go(func() {
			var none []byte
			a.count(what, conn.Invoke(a.ctx, "/epochkv.v1."+method, &message, &none))
		})
	}
	all.Wait()
}

// touches changes the deadlines of many keys, one request after the other, and then several at once.
func (a *attacker) touches() {
	a.putMany()
	for range a.times(1, 4) {
		a.call("touches", "KVService/InvokeAll", manyInvocations(touch))
	}
	a.atOnce(a.times(2, 3), "touches", "KVService/InvokeAll", manyInvocations(touch))
}

// unreadTouches is touches whose answers, which have the values, are not read.
func (a *attacker) unreadTouches() {
	a.putMany()
	a.begun(a.times(2, 6), a.times(2, 3), "KVService/InvokeAll", manyInvocations(touchAndGet))
	a.call("touches", "KVService/InvokeAll", manyInvocations(touch))
}

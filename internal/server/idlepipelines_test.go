package server

import (
	"bytes"
	"runtime"
	"slices"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/telemetry"
	"github.com/epochkv/epochkv/internal/testseed"
)

// idlePipeline is a pipeline of the gRPC library whose client takes all answers, and leaves nothing in memory itself.
func (h *harness) idlePipeline(t *testing.T, conn *connection) *pipeline {
	t.Helper()
	c, err := h.takeExecutor()
	if err != nil {
		t.Fatal(err)
	}
	p := &pipeline{stream: discard{}}
	c.ctx = testContext(t)
	p.begin(h.Server, conn, "", origin{})
	p.ctx, p.executor = c.ctx, c
	p.init()
	t.Cleanup(c.release)
	return p
}

// request executes an encoded request, as receive does.
func (p *pipeline) request(t *testing.T, data []byte) {
	t.Helper()
	if err := p.in.UnmarshalVT(data); err != nil || p.in.failed != nil {
		t.Fatal(err, p.in.failed)
	}
	if err := p.serve(); err != nil {
		t.Fatal(err)
	}
}

// TestPipelinesTogetherKeepLittle of their requests, whatever these were: each may wait for its next one for ever. The writes fail, so that the store keeps
// nothing of them.
func TestPipelinesTogetherKeepLittle(t *testing.T) {
	testseed.SkipUnderRace(t)
	const pipelines, size, most = 160, 60_000, 8<<20 + 160*2<<10 // each may keep a little that does not count
	h := mustStart(t, func(c *config.Config) { c.Transport = config.TransportGRPC })
	value, key := make([]byte, size), []byte("k")
	h.put(t, "k", string(value))
	absent := []*pb.Precondition{{Key: key, Condition: &pb.Precondition_Exists{}}}
	conditions := slices.Repeat(absent, 60)
	large := &pb.BatchWriteRequest{Preconditions: absent, Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: key, Value: value}}}
	small, invokes, reads := &pb.BatchWriteRequest{Preconditions: absent}, new(pb.InvokeAllRequest), new(pb.BatchGetRequest)
	for i := range 100 {
		one := []byte{1, byte(i)}
		small.Mutations = append(small.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: one, Value: value[:100]})
		invokes.Invocations = append(invokes.Invocations, &pb.Invocation{Key: one, Operation: &pb.Invocation_CompareAndSet{
			CompareAndSet: &pb.CompareAndSet{Expect: value[:100], Value: value[:100]},
		}})
		reads.Keys = append(reads.Keys, bytes.Repeat(one, 100))
	}
	var requests [][]byte
	for _, r := range []*pb.PipelineRequest{
		{Request: &pb.PipelineRequest_Put{Put: &pb.PutRequest{Key: key, Value: value, Preconditions: absent, RequestId: newRequestID(t)}}},
		getRequest(1, "k"),
		{Request: &pb.PipelineRequest_BatchWrite{BatchWrite: large}},
		{Request: &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: &pb.Invocation{
			Key: key, Operation: &pb.Invocation_PutIfAbsent{PutIfAbsent: value},
		}}}},
		{Request: &pb.PipelineRequest_Put{Put: padded(&pb.PutRequest{Key: key, Preconditions: conditions}, size/2)}},
		{Request: &pb.PipelineRequest_Get{Get: padded(&pb.GetRequest{Key: bytes.Repeat(key, 1000)}, size)}},
		{Request: &pb.PipelineRequest_BatchWrite{BatchWrite: small}},
		{Request: &pb.PipelineRequest_InvokeAll{InvokeAll: invokes}},
		{Request: &pb.PipelineRequest_BatchGet{BatchGet: reads}},
		{Request: &pb.PipelineRequest_Delete{Delete: &pb.DeleteRequest{Key: bytes.Repeat(key, 1000), Preconditions: conditions}}},
		{Request: &pb.PipelineRequest_BatchWrite{BatchWrite: &pb.BatchWriteRequest{Mutations: slices.Repeat([]*pb.Mutation{{}}, 100)}}}, // below what counts its elements
	} {
		requests = append(requests, mustMarshal(t, r))
	}
	conn := &connection{shard: new(telemetry.Requests).Shard()}
	all := []*pipeline{h.idlePipeline(t, conn)}
	all[0].request(t, requests[0])
	if kept := cap(all[0].in.put.Put.Value); kept < size {
		t.Errorf("a pipeline keeps a buffer of %d bytes for its next request although there is room", kept)
	}
	for range pipelines {
		all = append(all, h.idlePipeline(t, conn))
	}
	before := liveHeap()
	for i, p := range all {
		for k := range requests {
			p.request(t, requests[(i+k)%len(requests)])
		}
	}
	if kept := liveHeap() - before; kept > most {
		t.Errorf("%d pipelines keep %d KiB, want at most %d KiB", pipelines, kept>>10, most>>10)
	}
	runtime.KeepAlive(all)
}

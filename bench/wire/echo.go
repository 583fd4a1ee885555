package wire

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc"

	pb "epochkv/api/proto/epochkv/v1"
)

// echo answers every request with a message like the one that kvserver would send.
type echo struct {
	pb.UnimplementedKVServer
	value []byte
}

func newEcho() *echo { return &echo{value: make([]byte, valueBytes)} }

func (e *echo) found() *pb.GetResponse {
	return &pb.GetResponse{Found: true, Value: e.value, Epoch: 1_000_000, ReadEpoch: 1_000_001}
}

// Get implements KV.
func (e *echo) Get(context.Context, *pb.GetRequest) (*pb.GetResponse, error) { return e.found(), nil }

// Put implements KV.
func (e *echo) Put(context.Context, *pb.PutRequest) (*pb.PutResponse, error) {
	return &pb.PutResponse{Epoch: 1_000_000}, nil
}

// BatchGet implements KV.
func (e *echo) BatchGet(_ context.Context, r *pb.BatchGetRequest) (*pb.BatchGetResponse, error) {
	out := &pb.BatchGetResponse{ReadEpoch: 1_000_001, Results: make([]*pb.BatchGetResult, len(r.Keys))}
	for i := range out.Results {
		out.Results[i] = &pb.BatchGetResult{Found: true, Value: e.value, Epoch: 1_000_000}
	}
	return out, nil
}

// BatchWrite implements KV.
func (e *echo) BatchWrite(context.Context, *pb.BatchWriteRequest) (*pb.BatchWriteResponse, error) {
	return &pb.BatchWriteResponse{Epoch: 1_000_000}, nil
}

// Pipeline implements KV. One loop, no allocation of its own: faster than anything that has work to do.
func (e *echo) Pipeline(stream grpc.BidiStreamingServer[pb.PipelineRequest, pb.PipelineResponse]) error {
	var in pb.PipelineRequest
	get := &pb.PipelineResponse_Get{Get: e.found()}
	put := &pb.PipelineResponse_Put{Put: &pb.PutResponse{Epoch: 1_000_000}}
	var out pb.PipelineResponse
	for {
		resetRequest(&in)
		if err := stream.RecvMsg(&in); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		out.Id = in.Id
		switch in.Request.(type) {
		case *pb.PipelineRequest_Get:
			out.Response = get
		default:
			out.Response = put
		}
		if err := stream.SendMsg(&out); err != nil {
			return err
		}
	}
}

// resetRequest keeps the message of the kind at hand, which the decoder then fills again.
func resetRequest(in *pb.PipelineRequest) {
	switch r := in.Request.(type) {
	case *pb.PipelineRequest_Get:
		r.Get.ResetVT()
	case *pb.PipelineRequest_Put:
		r.Put.ResetVT()
	}
}

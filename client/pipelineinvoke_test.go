package client_test

import (
	"errors"
	"testing"

	"google.golang.org/grpc"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// droppingServer has executed each request before, and has not kept its answer.
type droppingServer struct {
	kvpb.UnimplementedKVServiceServer
}

// Pipeline implements kvpb.KVServiceServer.
func (droppingServer) Pipeline(stream grpc.BidiStreamingServer[kvpb.PipelineRequest, kvpb.PipelineResponse]) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			return nil //nolint:nilerr // the client has ended the stream
		}
		if err := stream.Send(&kvpb.PipelineResponse{Id: request.GetId(), Response: &kvpb.PipelineResponse_Invoke{
			Invoke: &kvpb.InvokeResponse{Epoch: 8, Deduplicated: true, ResultDropped: true},
		}}); err != nil {
			return err
		}
	}
}

// TestPipelineTellsOfADroppedResult: an operation that was executed by an attempt before is not one that was not applied.
func TestPipelineTellsOfADroppedResult(t *testing.T) {
	c := serveFake(t, func(g *grpc.Server) { kvpb.RegisterKVServiceServer(g, droppingServer{}) }, quick)
	p := mustPipeline(t, c, 4)
	var told error
	var at client.Epoch
	if err := p.Invoke(client.Append([]byte("k"), []byte("long")), func(_ client.Outcome, e client.Epoch, err error) { told, at = err, e }, client.As(c.NewRequestID())); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(told, client.ErrResultDropped) || at != 8 {
		t.Errorf("told %v at epoch %d, want that the result was dropped, and the epoch of the write", told, at)
	}
}

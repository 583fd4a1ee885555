package wire

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime/debug"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/server"
)

// tune gives the echo server the garbage collector settings that kvserver gives itself.
func tune() {
	debug.SetGCPercent(1600)
	debug.SetMemoryLimit(2 << 30)
}

// ServeEcho answers every request from constants until ctx ends, with kvserver's gRPC settings and garbage collector.
func ServeEcho(ctx context.Context, listener net.Listener) error {
	return serve(ctx, listener, newEcho(), echoTransactions{})
}

func serve(ctx context.Context, listener net.Listener, kv pb.KVServiceServer, transactions pb.TransactionServiceServer) error {
	tune()
	s := grpc.NewServer(append(server.Options(), grpc.MaxRecvMsgSize(messageBytes))...)
	pb.RegisterKVServiceServer(s, kv)
	pb.RegisterTransactionServiceServer(s, transactions)
	stop := context.AfterFunc(ctx, s.Stop)
	defer stop()
	return s.Serve(listener)
}

// echoTransactions answers every plan with "done".
type echoTransactions struct {
	pb.UnimplementedTransactionServiceServer
}

// Execute implements Transactions.
func (echoTransactions) Execute(context.Context, *pb.ExecuteRequest) (*pb.ExecuteResponse, error) {
	return &pb.ExecuteResponse{Succeeded: true, Epoch: 1_000_000, Results: []*pb.OperationResult{{}}}, nil
}

// echo answers every request with a message like the one that kvserver would send.
type echo struct {
	pb.UnimplementedKVServiceServer
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

// Scan implements KV: one page of as many entries as the request allows.
func (e *echo) Scan(r *pb.ScanRequest, stream grpc.ServerStreamingServer[pb.ScanResponse]) error {
	page := &pb.ScanResponse{Count: r.Limit, ReadEpoch: 1_000_001, Entries: make([]*pb.Entry, r.Limit)}
	for i := range page.Entries {
		page.Entries[i] = &pb.Entry{Key: r.GetRange().GetStart(), Value: e.value, Epoch: 1_000_000}
	}
	return stream.Send(page)
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
	in.Id = 0 // zero is not on the wire
	switch r := in.Request.(type) {
	case *pb.PipelineRequest_Get:
		r.Get.ResetVT()
	case *pb.PipelineRequest_Put:
		r.Put.ResetVT()
	}
}

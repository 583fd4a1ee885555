package wire

import (
	"context"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/bench/harness"
)

// serverStreams compare streams of the server's own transport with those of the gRPC library.
func serverStreams() []harness.Scenario {
	scenario := func(name, about, unit string, size int, work workload) harness.Scenario {
		s := harness.Scenario{
			Name: name, About: about + " The other epochkv serves with --transport grpc-go.", Unit: unit,
			Axis: harness.Axis{Name: "callers", Points: []int{1, 16}}, Size: size, Weight: 2,
			Arms: []harness.Arm{
				{Name: ours, Run: arm{start: startKV, work: work}.run},
				{Name: overGRPC, Run: arm{start: startKVOverGRPC, work: work, overGRPC: true}.run},
			},
			Figures: []harness.Figure{{Arm: ours, Against: overGRPC, AtLeast: 0.95, Source: "scans and transactions lose at most 5 % against grpc-go"}},
		}
		if !work.writes {
			s.Load, s.Stage = loaded, "wire reads"
		}
		return s
	}
	return []harness.Scenario{
		scenario("wire-scan", "Scans of 100,000 entries, 128 in a run, counted per entry.", "entries", 128*loaded, scanAll),
		scenario("wire-transact", "Interactive transactions, a stream each, that read a key, write it and commit asynchronously.", "transactions", 24_000, transact),
	}
}

// scanAll reads all keys again and again.
var scanAll = workload{run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, _ bool) error {
	return callers(ctx, conns, n, max(size/keys.count, 1), func(ctx context.Context, kv pb.KVServiceClient, _ int) error {
		stream, err := kv.Scan(ctx, &pb.ScanRequest{})
		if err != nil {
			return err
		}
		entries := 0
		for {
			page, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return err
			}
			for _, e := range page.Entries {
				if len(e.Value) != valueBytes {
					return fmt.Errorf("%w: an entry of %d bytes", errWrong, len(e.Value))
				}
			}
			entries += len(page.Entries)
		}
		if entries != keys.count {
			return fmt.Errorf("%w: a scan has %d entries of %d", errWrong, entries, keys.count)
		}
		return nil
	})
}}

// transact writes to each key what it read of it.
var transact = workload{writes: true, over: true, run: func(ctx context.Context, conns []*grpc.ClientConn, n, size int, keys keyspace, _ bool) error {
	return transactionCallers(ctx, conns, n, size, func(ctx context.Context, t pb.TransactionServiceClient, i int) error {
		i %= keys.count
		key := keys.key(make([]byte, 0, keyBytes), i)
		stream, err := t.Transact(ctx)
		if err != nil {
			return err
		}
		ask := func(request *pb.TransactRequest) (*pb.TransactResponse, error) {
			if err := stream.Send(request); err != nil {
				return nil, err
			}
			answer, err := stream.Recv()
			if err == nil && answer.GetError() != nil {
				err = fmt.Errorf("%w: %v", errWrong, answer.GetError())
			}
			return answer, err
		}
		if _, err := ask(&pb.TransactRequest{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{Durability: pb.Durability_DURABILITY_ASYNC}}}); err != nil {
			return err
		}
		found, err := ask(&pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: key}}})
		if err != nil {
			return err
		}
		if err := checkFound(found.GetGet().GetFound(), found.GetGet().GetValue(), i, false); err != nil {
			return err
		}
		put := &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: key, Value: found.GetGet().GetValue()}
		if _, err := ask(&pb.TransactRequest{Request: &pb.TransactRequest_Write{Write: &pb.WriteRequest{Mutations: []*pb.Mutation{put}}}}); err != nil {
			return err
		}
		if _, err := ask(&pb.TransactRequest{Request: &pb.TransactRequest_Commit{Commit: &pb.CommitRequest{}}}); err != nil {
			return err
		}
		if err := stream.CloseSend(); err != nil {
			return err
		}
		if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
			return fmt.Errorf("%w: after the commit: %w", errWrong, err)
		}
		return nil
	})
}}

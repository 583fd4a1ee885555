package server

import (
	"context"
	"encoding/binary"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// BenchmarkConditionalPut is one condition and one put, SYNC, by 64 callers over gRPC on a real
// file system, each way there is; put=plain is what the same without a condition costs.
//
//	way=direct       conditions on keys: a write with preconditions
//	way=transaction  the same with a read among the operations
//	way=interactive  begin, get, put, commit on one stream
func BenchmarkConditionalPut(b *testing.B) {
	for _, way := range []string{"plain", "direct", "transaction", "interactive"} {
		b.Run("way="+way, func(b *testing.B) { benchConditional(b, way) })
	}
}

func benchConditional(b *testing.B, way string) {
	c := config.Default()
	c.DataDir, c.Listen, c.HTTP = b.TempDir(), "127.0.0.1:0", ""
	s, err := Open(b.Context(), c, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	}()
	const callers, connections = 64, 8
	var conns [connections]*grpc.ClientConn
	for i := range conns {
		if conns[i], err = grpc.NewClient("passthrough:///"+s.Address(), grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultCallOptions(grpc.ForceCodecV2(pb.NewCodec()))); err != nil {
			b.Fatal(err)
		}
		defer func() { _ = conns[i].Close() }()
	}
	var next atomic.Int64
	var all sync.WaitGroup
	b.ReportAllocs()
	b.ResetTimer()
	for n := range callers {
		all.Go(func() {
			call := newConditional(b, conns[n%connections], way)
			for {
				i := next.Add(1)
				if i > int64(b.N) {
					return
				}
				if err := call(binary.BigEndian.AppendUint64(nil, uint64(i)*0x9e3779b97f4a7c15)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "ops/s")
}

// newConditional is one caller: it puts a key if it is absent.
func newConditional(b *testing.B, conn *grpc.ClientConn, way string) func(key []byte) error {
	ctx, value := context.Background(), make([]byte, 100)
	kv, txns := pb.NewKVServiceClient(conn), pb.NewTransactionServiceClient(conn)
	switch way {
	case "plain":
		return func(key []byte) error {
			_, err := kv.Put(ctx, &pb.PutRequest{Key: key, Value: value})
			return err
		}
	case "interactive":
		ctx, cancel := context.WithCancel(ctx)
		b.Cleanup(cancel)
		stream, err := txns.Transact(ctx)
		if err != nil {
			b.Fatal(err)
		}
		k := &talk{t: b, stream: stream}
		return func(key []byte) error {
			requests := []*pb.TransactRequest{
				beginRequest(new(pb.BeginRequest)), txnGetRequest(string(key)), txnPutRequest(string(key), string(value)), commitRequest,
			}
			for _, r := range requests {
				if err := stream.Send(r); err != nil {
					return err
				}
			}
			for range requests {
				if _, err := k.hear(); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return func(key []byte) error {
		req := &pb.ExecuteRequest{
			Conditions: conditions(&pb.TxnCondition{Condition: &pb.TxnCondition_Key{Key: &pb.Precondition{
				Key: key, Condition: &pb.Precondition_Exists{Exists: false},
			}}}),
			ThenOperations: operations(&pb.Operation{Operation: &pb.Operation_Write{Write: &pb.Mutation{
				Kind: pb.Mutation_KIND_PUT, Key: key, Value: value,
			}}}),
		}
		if way == "transaction" {
			req.ThenOperations = append(req.ThenOperations, &pb.Operation{Operation: &pb.Operation_Get{Get: &pb.KeyReadRequest{Key: key}}})
		}
		_, err := txns.Execute(ctx, req)
		return err
	}
}

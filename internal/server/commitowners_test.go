package server

import (
	"context"
	"fmt"
	"sync"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// TestLargeCommitsAreOfTheirConnections: the engine knows the client and the connection of each large commit, so that those of one wait for few of another.
func TestLargeCommitsAreOfTheirConnections(t *testing.T) {
	var (
		mu   sync.Mutex
		seen []mvcc.Owner
	)
	of := ownerOf
	defer func() { ownerOf = of }()
	ownerOf = func(ctx context.Context) mvcc.Owner {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, of(ctx))
		return seen[len(seen)-1]
	}
	var batch []*pb.Mutation
	for i := range 200 {
		batch = append(batch, &pb.Mutation{Kind: pb.Mutation_KIND_PUT, Key: fmt.Append(nil, "key", i)})
	}
	requests := map[string]func(*testing.T, pb.KVServiceClient, pb.TransactionServiceClient) error{
		"batch": func(t *testing.T, kv pb.KVServiceClient, _ pb.TransactionServiceClient) error {
			_, err := kv.BatchWrite(testContext(t), &pb.BatchWriteRequest{Mutations: batch})
			return err
		},
		"put": func(t *testing.T, kv pb.KVServiceClient, _ pb.TransactionServiceClient) error {
			_, err := kv.Put(testContext(t), &pb.PutRequest{Key: []byte("large"), Value: make([]byte, 100_000)})
			return err
		},
		"execution": func(t *testing.T, _ pb.KVServiceClient, txns pb.TransactionServiceClient) error {
			e := &pb.ExecuteRequest{}
			for _, m := range batch {
				e.ThenOperations = append(e.ThenOperations, &pb.Operation{Operation: &pb.Operation_Write{Write: m}})
			}
			_, err := txns.Execute(testContext(t), e)
			return err
		},
		"pipeline": func(t *testing.T, kv pb.KVServiceClient, _ pb.TransactionServiceClient) error {
			stream, err := kv.Pipeline(testContext(t))
			if err == nil {
				err = stream.Send(&pb.PipelineRequest{Request: &pb.PipelineRequest_BatchWrite{BatchWrite: &pb.BatchWriteRequest{Mutations: batch}}})
			}
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
	}
	onBothTransports(t, func(t *testing.T, h *harness) {
		for name, request := range requests {
			seen = nil
			for _, address := range []string{"127.0.0.2", "127.0.0.2", "127.0.0.3"} {
				conn := h.dialFrom(t, address)
				if err := request(t, pb.NewKVServiceClient(conn), pb.NewTransactionServiceClient(conn)); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			mu.Lock()
			owners := map[mvcc.Owner]bool{}
			clients := map[string]bool{}
			for _, owner := range seen {
				owners[owner], clients[owner.Client] = true, true
			}
			if len(owners) != 3 || len(clients) != 2 || !clients["127.0.0.2/32"] || !clients["127.0.0.3/32"] {
				t.Errorf("%s: the commits are of %v", name, seen)
			}
			mu.Unlock()
		}
	})
}

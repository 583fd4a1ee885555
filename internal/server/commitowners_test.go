package server

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// TestLargeCommitsAreOfTheirConnections: the engine knows the client and the connection of each large commit, so that those of one wait for few of another.
func TestLargeCommitsAreOfTheirConnections(t *testing.T) {
	owners := noteOwners(t)
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
			owners()
			for _, address := range []string{"127.0.0.2", "127.0.0.2", "127.0.0.3"} {
				conn := h.dialFrom(t, address)
				if err := request(t, pb.NewKVServiceClient(conn), pb.NewTransactionServiceClient(conn)); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			if seen := owners(); !ofThree(seen) {
				t.Errorf("%s: the commits are of %v", name, seen)
			}
		}
	})
}

// noteOwners returns a function that returns whose the requests are of which the engine or the leases have asked since the call before.
func noteOwners(t *testing.T) func() []mvcc.Owner {
	var (
		mu   sync.Mutex
		seen []mvcc.Owner
	)
	of := ownerOf
	t.Cleanup(func() { ownerOf = of })
	ownerOf = func(ctx context.Context) mvcc.Owner {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, of(ctx))
		return seen[len(seen)-1]
	}
	return func() []mvcc.Owner {
		mu.Lock()
		defer mu.Unlock()
		all := seen
		seen = nil
		return all
	}
}

// ofThree reports whether requests are of three connections of two clients.
func ofThree(seen []mvcc.Owner) bool {
	owners, clients := map[mvcc.Owner]bool{}, map[string]bool{}
	for _, owner := range seen {
		owners[owner], clients[owner.Client] = true, true
	}
	return len(owners) == 3 && len(clients) == 2 && clients["127.0.0.2/32"] && clients["127.0.0.3/32"]
}

// TestKeepAlivesAreOfTheirClients: leases have turns by client when they end, and so have the sessions of what keep-alives commit.
func TestKeepAlivesAreOfTheirClients(t *testing.T) {
	owners := noteOwners(t)
	onBothTransports(t, func(t *testing.T, h *harness) {
		granted, err := pb.NewLeaseServiceClient(h.conn).GrantLease(testContext(t), &pb.GrantLeaseRequest{Ttl: durationpb.New(time.Hour)})
		if err != nil {
			t.Fatal(err)
		}
		owners()
		for _, address := range []string{"127.0.0.2", "127.0.0.2", "127.0.0.3"} {
			stream, err := pb.NewLeaseServiceClient(h.dialFrom(t, address)).KeepAlive(testContext(t))
			if err == nil {
				err = stream.Send(&pb.KeepAliveRequest{Ids: []uint64{granted.Id}})
			}
			if err == nil {
				_, err = stream.Recv()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if seen := owners(); !ofThree(seen) {
			t.Errorf("keep-alives are of %v", seen)
		}
	})
}

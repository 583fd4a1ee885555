package server

import (
	"context"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
)

// TestRequestsOfOneClientThatWaitForASyncLeaveRoomToOthers: writes, and reads, because what they have read could be lost in a crash. While the device is slow, one
// client with many connections had all small reads. Requests that are large because of their operations take little while they wait.
func TestRequestsOfOneClientThatWaitForASyncLeaveRoomToOthers(t *testing.T) {
	get := func(ctx context.Context, kv pb.KVServiceClient, key string) error {
		_, err := kv.Get(ctx, &pb.GetRequest{Key: []byte(key)})
		return err
	}
	batchGet := func(ctx context.Context, kv pb.KVServiceClient, key string) error {
		in := &pb.BatchGetRequest{Keys: [][]byte{[]byte(key)}}
		for i := range 100 {
			in.Keys = append(in.Keys, fmt.Append(nil, i))
		}
		_, err := kv.BatchGet(ctx, in)
		return err
	}
	batchWrite := func(ctx context.Context, kv pb.KVServiceClient, key string) error {
		in := &pb.BatchWriteRequest{Mutations: []*pb.Mutation{{Kind: pb.Mutation_KIND_PUT, Key: []byte(key)}}, Durability: pb.Durability_DURABILITY_SYNC}
		for i := range 60 {
			in.Mutations = append(in.Mutations, &pb.Mutation{Kind: pb.Mutation_KIND_DELETE, Key: fmt.Append(nil, i)})
		}
		_, err := kv.BatchWrite(ctx, in)
		return err
	}
	for name, c := range map[string]struct {
		share   share
		request func(ctx context.Context, kv pb.KVServiceClient, key string) error
	}{"gets": {shareSmallReads, get}, "batches of reads": {shareLargeReads, batchGet}, "batches of writes": {shareLargeWrites, batchWrite}} {
		t.Run(name, func(t *testing.T) {
			withTransports(t, func(t *testing.T, with func(*config.Config)) { waitForASync(t, with, c.share, c.request) })
		})
	}
}

func waitForASync(t *testing.T, with func(*config.Config), sh share, request func(ctx context.Context, kv pb.KVServiceClient, key string) error) {
	const requests, conns, each = 40, 8, 8
	h := mustStart(t, with, func(c *config.Config) { c.Limits.InflightRequests = requests })
	h.put(t, "durable", "v")
	release, ctx, visible := h.holdSyncs(t), testContext(t), h.store.Visible()
	written := make(chan error, 1)
	go func() {
		_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_SYNC})
		written <- err
	}()
	eventually(t, "a put waits", func() bool { return h.store.Visible() > visible })
	ended, other := make(chan error, conns*each), make(chan error, 1)
	for range conns {
		kv := pb.NewKVServiceClient(h.dialFrom(t, "127.0.0.2"))
		for range each {
			go func() { ended <- request(ctx, kv, "k") }()
		}
	}
	share := &h.admission.words[sh].word
	waiting := func() int { return int(share.Load() >> admissionShift) }
	eventually(t, "all wait, or are refused", func() bool {
		n := waiting() // those that are executed, and may be refused yet, are no client's
		return len(ended)+n == conns*each && h.admission.refused.Load() == uint64(len(ended)) && h.clientsHave(ownedReadRequests+ownedKind(sh)) == int64(n)
	})
	before := waiting()
	if left := requests - before; left < requests/4 || before < requests/4 {
		t.Errorf("%d of %d requests are left", left, requests)
	}
	go func() { other <- request(ctx, h.kv, "durable") }()
	eventually(t, "that of another client waits, or has ended", func() bool { return len(other) > 0 || waiting() > before })
	release()
	if err := <-other; err != nil {
		t.Errorf("of another client: %v", err)
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
	for range conns * each {
		if err := <-ended; err != nil && status.Code(err) != codes.ResourceExhausted {
			t.Error(err)
		}
	}
	eventually(t, "nothing is counted", func() bool { return share.Load() == 0 && h.clientsHave(ownedReadRequests+ownedKind(sh)) == 0 })
}

// clientsHave is how much all clients have of a kind.
func (h *harness) clientsHave(kind ownedKind) (n int64) {
	c := &h.receiving.clients
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, client := range c.all {
		n += client.owned[kind].Load()
	}
	return n
}

package server

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/testseed"
)

// TestEveryFailureReleasesEverything: requests of every kind that are answered, refused,
// expired and cancelled at any moment, on connections that go on and on connections that are closed
// under them, some of which never read. When all is quiet nothing is counted any more: not by a
// share, not by a connection that goes on, not as being received; and the connections that went on
// are of as much use as before.
func TestEveryFailureReleasesEverything(t *testing.T) {
	seed := testseed.Base(t)
	h := mustStart(t, func(c *config.Config) {
		c.Limits.InflightBytes, c.Limits.InflightRequests = 24*config.MiB, 64
		c.Limits.BatchSize, c.Limits.ValueSize = 2*config.MiB, 2*config.MiB
	})
	h.putLarge(t, 8, 300<<10)
	slow := h.slowSyncs(time.Millisecond)
	stay := []*grpc.ClientConn{h.conn, h.dial(t), h.dialDeaf(t)}
	deadline := time.Now().Add(2 * time.Second)
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			for time.Now().Before(deadline) {
				conn := stay[i%len(stay)]
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(random.IntN(30_000))*time.Microsecond)
				var closing *grpc.ClientConn
				if i >= 9 {
					closing = h.dial(t)
					conn = closing
				}
				if random.IntN(2) == 0 {
					time.AfterFunc(time.Duration(random.IntN(8000))*time.Microsecond, cancel)
				}
				anything(ctx, conn, random)
				if closing != nil {
					_ = closing.Close()
				}
				cancel()
			}
		})
	}
	wg.Wait()
	slow.Remove()
	var left string
	for range 1000 {
		runtime.GC() // finds the buffers that gRPC has lost
		requests, bytes, answers := h.admission.inflight()
		left = ""
		if requests != 0 || bytes != 0 || answers != 0 || h.receiving.reserved() != 0 || h.counters.streams.Load() != 0 {
			left = fmt.Sprintf("%d requests of %d bytes, answers of %d, %d bytes being received, %d streams", requests, bytes, answers, h.receiving.reserved(), h.counters.streams.Load())
		}
		if left == "" {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if left != "" {
		t.Errorf("never given back: %s", left)
	}
	for i, conn := range stay[:2] {
		kv := pb.NewKVServiceClient(conn)
		large := &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 2<<20-100), Durability: pb.Durability_DURABILITY_ASYNC}
		if _, err := kv.Put(testContext(t), large); err != nil {
			t.Errorf("connection %d: %v", i, err)
		}
		if out, err := kv.Get(testContext(t), &pb.GetRequest{Key: []byte("k")}); err != nil || len(out.Value) != len(large.Value) {
			t.Errorf("connection %d: %v", i, err)
		}
	}
}

// anything makes one request of any kind, and looks at nothing that comes of it.
func anything(ctx context.Context, conn *grpc.ClientConn, random *rand.Rand) {
	kv, txns := pb.NewKVServiceClient(conn), pb.NewTransactionServiceClient(conn)
	key := fmt.Appendf(nil, "large/%03d", random.IntN(8))
	value := make([]byte, []int{10, 5_000, 100_000, 700_000}[random.IntN(4)])
	durability := pb.Durability(random.IntN(3))
	put := &pb.PutRequest{Key: key, Value: value, Durability: durability}
	exchange := &pb.Invocation{Key: key, Operation: &pb.Invocation_GetAndSet{GetAndSet: value}, ReturnOld: true}
	switch random.IntN(10) {
	case 0:
		_, _ = kv.Put(ctx, put)
	case 1:
		_, _ = kv.Get(ctx, &pb.GetRequest{Key: key})
	case 2:
		_, _ = kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: [][]byte{key, []byte("large/000"), []byte("none")}})
	case 3:
		_, _ = kv.Invoke(ctx, &pb.InvokeRequest{Invocation: exchange, Durability: durability})
	case 4:
		stream, err := kv.Scan(ctx, &pb.ScanRequest{PageBytes: uint32(random.IntN(1 << 20)), Tokens: pb.ResumeTokens(random.IntN(3))})
		for range random.IntN(4) {
			if err == nil {
				_, err = stream.Recv()
			}
		}
	case 5, 6:
		stream, err := kv.Pipeline(ctx)
		if err != nil {
			return
		}
		sent := random.IntN(30)
		for i := range sent {
			r := putRequest(uint64(i), string(key), string(value), durability)
			switch random.IntN(3) {
			case 0:
				r = getRequest(uint64(i), string(key))
			case 1:
				r.Request = &pb.PipelineRequest_Invoke{Invoke: &pb.InvokeRequest{Invocation: exchange, Durability: durability}}
			}
			if stream.Send(r) != nil {
				return
			}
		}
		if random.IntN(2) == 0 {
			_ = stream.CloseSend()
		}
		for range random.IntN(1 + sent) {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	case 7:
		_, _ = txns.Execute(ctx, &pb.ExecuteRequest{
			ThenOperations: []*pb.Operation{
				{Operation: &pb.Operation_Invoke{Invoke: exchange}},
				{Operation: &pb.Operation_Scan{Scan: &pb.RangeReadRequest{Range: new(pb.KeyRange), Limit: 4}}},
			},
			Durability: durability,
		})
	case 8:
		stream, err := txns.Transact(ctx)
		if err != nil {
			return
		}
		for _, r := range []*pb.TransactRequest{
			{Request: &pb.TransactRequest_Begin{Begin: &pb.BeginRequest{Durability: durability}}},
			{Request: &pb.TransactRequest_Scan{Scan: &pb.RangeReadRequest{Range: new(pb.KeyRange), Limit: 3}}},
			{Request: &pb.TransactRequest_Invoke{Invoke: exchange}},
			{Request: &pb.TransactRequest_Commit{Commit: new(pb.CommitRequest)}},
		} {
			if stream.Send(r) != nil || random.IntN(8) == 0 {
				return
			}
		}
		for range random.IntN(5) {
			if _, err := stream.Recv(); err != nil {
				return
			}
		}
	case 9:
		stream, err := kv.BulkLoad(ctx)
		for i := 0; err == nil && i < random.IntN(4); i++ {
			err = stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: key, Value: value}}})
		}
		if err == nil && random.IntN(2) == 0 {
			_, err = stream.CloseAndRecv()
		}
		if errors.Is(err, io.EOF) {
			_ = stream.RecvMsg(new(pb.BulkLoadResponse))
		}
	}
}

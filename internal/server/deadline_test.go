package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWritersThatGiveUpStopNoOther: tens of thousands of durable puts whose deadlines pass, or that
// are cancelled, around the moment at which they become durable, beside writers with time. Nothing
// that was acknowledged could be lost at that moment, each writer with time succeeds, and so does a
// put afterwards; the server can be shut down.
func TestWritersThatGiveUpStopNoOther(t *testing.T) {
	const impatient, healthy = 192, 8
	puts := 120
	if exhaustiveStep > 1 {
		puts = 40
	}
	h := mustStart(t)
	slow := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Delay: 2 * time.Millisecond})
	var acknowledged, gaveUp atomic.Int64
	var wg sync.WaitGroup
	put := func(ctx context.Context, key string) error {
		out, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte("v"), Durability: pb.Durability_DURABILITY_SYNC})
		if err == nil && uint64(h.store.Durable()) < out.GetEpoch() {
			t.Errorf("epoch %d was acknowledged at durable epoch %d", out.GetEpoch(), h.store.Durable())
		}
		return err
	}
	for g := range impatient {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g), 5))
			for i := range puts {
				after := time.Duration(2000+random.IntN(12000)) * time.Microsecond
				if i%64 == 0 {
					after = 2 * time.Second // on a slow machine the others may all be too late
				}
				ctx, cancel := context.WithTimeout(context.Background(), after+time.Duration(i%2)*time.Minute)
				time.AfterFunc(after+time.Duration(1-i%2)*time.Minute, cancel) // one of the two comes first
				switch err := put(ctx, fmt.Sprintf("impatient/%d", g)); status.Code(err) {
				case codes.OK:
					acknowledged.Add(1)
				case codes.DeadlineExceeded, codes.Canceled:
					gaveUp.Add(1)
				default:
					t.Error(err)
				}
				cancel()
			}
		})
	}
	for g := range healthy {
		wg.Go(func() {
			for range puts {
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				if err := put(ctx, fmt.Sprintf("healthy/%d", g)); err != nil {
					t.Errorf("a writer with time: %v", err)
				}
				cancel()
			}
		})
	}
	wg.Wait()
	slow.Remove()
	if acknowledged.Load() == 0 || gaveUp.Load() == 0 {
		t.Errorf("%d puts were acknowledged and %d gave up: the test met one kind only", acknowledged.Load(), gaveUp.Load())
	}
	if err := put(testContext(t), "afterwards"); err != nil {
		t.Fatalf("a put afterwards: %v", err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- h.stop() }()
	select {
	case err := <-stopped:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the server did not stop in a minute")
	}
}

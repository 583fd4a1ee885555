package server

import (
	"context"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/audit"
	"github.com/epochkv/epochkv/internal/config"
)

// TestRequestsThatLastLeaveRoomInTheAuditLog: those that wait for a lock or observe it, and streams of keep-alives, may be many, and last for days.
// Others need the room of their lines meanwhile, and each of them has its line nevertheless.
func TestRequestsThatLastLeaveRoomInTheAuditLog(t *testing.T) {
	h, lines := startAudited(t, func(c *config.Config) {
		c.Audit.Classes, c.Audit.Full, c.Audit.QueueSize = "write,read", audit.FullBlock, 64*config.KiB
	})
	const each = 50 // all together more than the queue has room for
	leases, locks := pb.NewLeaseServiceClient(h.conn), pb.NewLockServiceClient(h.conn)
	mustGrantLease(t, leases, 1, time.Hour)
	mustGrantLease(t, leases, 2, time.Hour)
	mustLock(t, h, "l", 1)
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	var waiting sync.WaitGroup
	for range each {
		waiting.Go(func() {
			_, _ = locks.AcquireLock(ctx, &pb.AcquireLockRequest{Name: []byte("l"), LeaseId: 2, Wait: durationpb.New(time.Hour)}) // until cancel
		})
		observer, err := locks.ObserveLock(ctx, &pb.ObserveLockRequest{Name: []byte("l")})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := observer.Recv(); err != nil {
			t.Fatal(err)
		}
		stream, err := leases.KeepAlive(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&pb.KeepAliveRequest{Ids: []uint64{1}}); err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "all wait or observe", func() bool { return h.leases.Stats().Waiters == 2*each })
	h.put(t, "k", "v")
	eventually(t, "nothing has room for its line", func() bool { return h.observer.audit.stats().QueueBytes == 0 })
	cancel()
	waiting.Wait()
	eventually(t, "the streams have ended", func() bool { return h.counters.streams.Load() == 0 && h.leases.Stats().Waiters == 0 })
	counts := map[string]int{}
	for _, l := range lines() {
		counts[l.Method]++
	}
	if counts["AcquireLock"] != each+1 || counts["ObserveLock"] != each || counts["KeepAlive"] != each || counts["Put"] != 1 {
		t.Errorf("lines: %v", counts)
	}
}

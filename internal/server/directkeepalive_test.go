package server

import (
	"context"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

// keepAlives opens a stream and sends one keep-alive on it.
func keepAlives(ctx context.Context, t *testing.T, h *harness, ids ...uint64) pb.LeaseService_KeepAliveClient {
	t.Helper()
	stream, err := pb.NewLeaseServiceClient(h.conn).KeepAlive(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.KeepAliveRequest{Ids: ids}); err != nil {
		t.Fatal(err)
	}
	return stream
}

// TestStreamsOfKeepAlivesTakeNoGoroutines: the goroutine that reads their connection serves them.
func TestStreamsOfKeepAlivesTakeNoGoroutines(t *testing.T) {
	h := mustStart(t, withDirect)
	mustGrantLease(t, pb.NewLeaseServiceClient(h.conn), 1, time.Hour)
	const streams = 100
	before := runtime.NumGoroutine()
	for range streams {
		stream := keepAlives(testContext(t), t, h, 1)
		for range 3 { // the messages are used again
			out, err := stream.Recv()
			if err != nil || len(out.Leases) != 1 || out.Leases[0].Id != 1 || out.Leases[0].TtlMs != 3_600_000 {
				t.Fatalf("%v, %v", out, err)
			}
			if err := stream.Send(&pb.KeepAliveRequest{Ids: []uint64{1}}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := h.counters.streams.Load(); n != streams {
		t.Errorf("%d streams are counted", n)
	}
	// The client has a goroutine for each of its streams.
	if after := runtime.NumGoroutine(); after-before > streams+streams/2 {
		t.Errorf("%d goroutines for %d streams, client included", after-before, streams)
	}
}

// TestAnswersOfKeepAlivesFitTheirRequests: messages of many leases and of few follow each other on one stream.
func TestAnswersOfKeepAlivesFitTheirRequests(t *testing.T) {
	h := mustStart(t)
	mustGrantLease(t, pb.NewLeaseServiceClient(h.conn), 7, time.Hour)
	stream := keepAlives(testContext(t), t, h, 7)
	sent := 1
	for _, n := range []int{1, 5, 3, keptIDsMax + 1, 2, 0, leaseListMax, 4, 1} {
		out, err := stream.Recv()
		if err != nil || len(out.Leases) != sent {
			t.Fatalf("%d answers for %d ids, %v", len(out.GetLeases()), sent, err)
		}
		sent = n
		for i, l := range out.Leases {
			if want := uint64(3_600_000); l.Id == 7 && l.TtlMs != want || l.Id != 7 && (l.TtlMs != 0 || l.Id != uint64(100+i)) {
				t.Fatalf("%d of %d: %v", i, len(out.Leases), l)
			}
		}
		ids := make([]uint64, n)
		for i := range ids {
			if ids[i] = uint64(100 + i); i == n/2 {
				ids[i] = 7
			}
		}
		if err := stream.Send(&pb.KeepAliveRequest{Ids: ids}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestLongKeepAliveIsRefusedBeforeItIsDecoded: a message of so many bytes has too many ids, or none. grpc-go refuses what a decoder
// refuses with a code of its own.
func TestLongKeepAliveIsRefusedBeforeItIsDecoded(t *testing.T) {
	h := mustStart(t, withDirect)
	ids := make([]uint64, 20*leaseListMax)
	for i := range ids {
		ids[i] = uint64(i)
	}
	_, err := keepAlives(testContext(t), t, h, ids...).Recv()
	wantReason(t, err, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	eventually(t, "no stream is open", func() bool { return h.counters.streams.Load() == 0 })
}

// TestKeepAliveThatWaitsEndsWithItsStream: it waits for a revocation that the device holds up.
func TestKeepAliveThatWaitsEndsWithItsStream(t *testing.T) {
	h := mustStart(t, withDirect)
	leases := pb.NewLeaseServiceClient(h.conn)
	mustGrantLease(t, leases, 1, time.Hour)
	mustGrantLease(t, leases, 2, time.Hour)
	until := make(chan struct{})
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until})
	defer rule.Remove()
	revoked := make(chan error, 1)
	go func() {
		_, err := leases.RevokeLease(testContext(t), &pb.RevokeLeaseRequest{Id: 1})
		revoked <- err
	}()
	eventually(t, "the lease is being revoked", func() bool {
		info, err := h.leases.Lease(t.Context(), 1)
		return err == nil && info.Revoking
	})
	ctx, cancel := context.WithCancel(testContext(t))
	stream := keepAlives(ctx, t, h, 1, 2)
	// Another stream of the connection is answered, whether this one waits or not.
	if out, err := keepAlives(testContext(t), t, h, 2).Recv(); err != nil || out.Leases[0].TtlMs != 3_600_000 {
		t.Errorf("%v, %v", out, err)
	}
	cancel()
	if out, err := stream.Recv(); err == nil && out.Leases[0].TtlMs != 0 { // nil if the machine is slow: it waits for a while only
		t.Errorf("%v, while the lease is being revoked", out)
	}
	eventually(t, "one stream is open", func() bool { return h.counters.streams.Load() == 1 })
	close(until)
	if err := <-revoked; err != nil {
		t.Error(err)
	}
	if err := h.stop(); err != nil { // nothing holds up the drain
		t.Error(err)
	}
}

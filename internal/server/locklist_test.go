package server

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/auth"
)

// TestLocksAreListedWithTheirWaiters: in the order of names, page by page, within the range that was asked for, with the right to read it.
func TestLocksAreListedWithTheirWaiters(t *testing.T) {
	h := mustStart(t)
	leases, locks, ctx := pb.NewLeaseServiceClient(h.conn), pb.NewLockServiceClient(h.conn), testContext(t)
	for id := uint64(1); id <= 3; id++ {
		mustGrantLease(t, leases, id, time.Hour)
	}
	token := mustLock(t, h, "jobs/a", 1)
	for _, name := range []string{"jobs/b", "jobs/c", "other"} {
		mustLock(t, h, name, 1)
	}
	for i, id := range []uint64{3, 2} {
		request := &pb.AcquireLockRequest{Name: []byte("jobs/a"), LeaseId: id, Wait: durationpb.New(time.Hour)}
		go func() { _, _ = locks.AcquireLock(ctx, request) }() // until the server ends
		for end := time.Now().Add(10 * time.Second); h.leases.Stats().Waiters != i+1; time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal("the request does not wait")
			}
		}
	}
	list := func(request *pb.ListLocksRequest, more bool, want ...string) []*pb.Lock {
		t.Helper()
		out, err := locks.ListLocks(ctx, request)
		if err != nil || out.GetMore() != more || len(out.GetLocks()) != len(want) {
			t.Fatalf("%v: %v, %v; want %v", request, out, err, want)
		}
		for i, l := range out.GetLocks() {
			if string(l.GetName()) != want[i] {
				t.Errorf("%v: lock %d is %s, want %s", request, i, l.GetName(), want[i])
			}
		}
		return out.GetLocks()
	}
	all := list(&pb.ListLocksRequest{}, false, "jobs/a", "jobs/b", "jobs/c", "other")
	if a := all[0]; a.GetHolder().GetLeaseId() != 1 || a.GetHolder().GetToken() != token || a.GetWaiters() != 2 || len(a.WaitingLeases) != 2 || a.WaitingLeases[0] != 3 || a.WaitingLeases[1] != 2 {
		t.Errorf("%v", a)
	}
	if all[1].GetWaiters() != 0 {
		t.Errorf("%v", all[1])
	}
	list(&pb.ListLocksRequest{Limit: 2}, true, "jobs/a", "jobs/b")
	list(&pb.ListLocksRequest{Limit: 2, After: []byte("jobs/b")}, false, "jobs/c", "other")
	list(&pb.ListLocksRequest{Start: []byte("jobs/"), End: []byte("jobs0")}, false, "jobs/a", "jobs/b", "jobs/c")
	list(&pb.ListLocksRequest{Start: []byte("jobs/b"), End: []byte("jobs0"), After: []byte("a")}, false, "jobs/b", "jobs/c")
	list(&pb.ListLocksRequest{End: []byte("jobs0"), After: []byte("x")}, false)
	_, err := locks.ListLocks(ctx, &pb.ListLocksRequest{Start: []byte("b"), End: []byte("a")})
	wantReason(t, err, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_RANGE)

	h.setUsers(map[string][]auth.Grant{"jobs": {grant("r", "jobs/")}, "writer": {grant("wl", "jobs/"), action(auth.ActionObserve)}})
	inside := &pb.ListLocksRequest{Start: []byte("jobs/"), End: []byte("jobs0")}
	if out, err := locks.ListLocks(as(ctx, "jobs"), inside); err != nil || len(out.GetLocks()) != 3 {
		t.Errorf("%v, %v", out, err)
	}
	for _, beyond := range []*pb.ListLocksRequest{{}, {Start: []byte("jobs/")}, {Start: []byte("jobs/"), End: []byte("jobs1")}, {Start: []byte("jobs"), End: []byte("jobs0")}} {
		if _, err = locks.ListLocks(as(ctx, "jobs"), beyond); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%v: %v", beyond, err)
		}
	}
	_, err = locks.ListLocks(as(ctx, "writer"), inside)
	if code := status.Code(err); code != codes.PermissionDenied {
		t.Errorf("%v", err)
	}
}

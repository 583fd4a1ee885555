package server

import (
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestStatusCountsFinishedRequestsByMethod, failed ones as well, and leaves out methods without a request.
func TestStatusCountsFinishedRequestsByMethod(t *testing.T) {
	h := mustStart(t)
	ctx := testContext(t)
	before, err := h.admin.Status(ctx, &pb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if _, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: []byte("v")}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := h.kv.Get(ctx, &pb.GetRequest{}); err == nil {
		t.Fatal("a get without a key succeeds")
	}
	status, err := h.admin.Status(ctx, &pb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	a := status.GetActivity()
	if n := a.GetCommits() - before.GetActivity().GetCommits(); n != 3 || a.GetSyncs() == 0 || a.GetLogBytes() == 0 {
		t.Errorf("%d commits, %d syncs, %d bytes of log", n, a.GetSyncs(), a.GetLogBytes())
	}
	found := map[string]*pb.MethodTotals{}
	for _, m := range a.GetMethods() {
		found[m.GetMethod()] = m
		sum := uint64(0)
		for _, n := range m.GetLatency() {
			sum += n
		}
		if sum != m.GetCount() {
			t.Errorf("%s: %d requests, %d latencies", m.GetMethod(), m.GetCount(), sum)
		}
	}
	if m := found["Put"]; m.GetCount() != 3 || m.GetFailed() != 0 {
		t.Errorf("Put: %v", m)
	}
	if m := found["Get"]; m.GetCount() != 1 || m.GetFailed() != 1 {
		t.Errorf("Get: %v", m)
	}
	if found["Status"].GetCount() != 1 || found["Scan"] != nil {
		t.Errorf("methods: %v", a.GetMethods())
	}
}

package server

import (
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// clockAfter waits until the clock of the server shows a time after that of everything so far, and returns the time before.
func clockAfter(t *testing.T, h *harness) uint64 {
	t.Helper()
	first, err := h.admin.Clock(testContext(t), &pb.ClockRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for {
		now, err := h.admin.Clock(testContext(t), &pb.ClockRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if now.GetTimeUs() > first.GetTimeUs()+5000 {
			return first.GetTimeUs() + 2500
		}
		time.Sleep(time.Millisecond)
	}
}

// TestReadsAtATime: gets, batches of gets, scans and read-only transactions read the state of a time, and say which epoch it was.
func TestReadsAtATime(t *testing.T) {
	h := mustStart(t, retaining)
	ctx, key := testContext(t), []byte("k")
	put := func(value string) uint64 {
		t.Helper()
		done, err := h.kv.Put(ctx, &pb.PutRequest{Key: key, Value: []byte(value)})
		if err != nil {
			t.Fatal(err)
		}
		return done.GetEpoch()
	}
	put("old")
	at := clockAfter(t, h)
	put("new")
	got, err := h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: at})
	if err != nil || string(got.GetValue()) != "old" {
		t.Fatalf("get: %v, %v", got, err)
	}
	again, err := h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotEpoch: got.GetReadEpoch()})
	if err != nil || string(again.GetValue()) != "old" {
		t.Fatalf("get at its epoch: %v, %v", again, err)
	}
	batch, err := h.kv.BatchGet(ctx, &pb.BatchGetRequest{Keys: [][]byte{key}, SnapshotTimeUs: at})
	if err != nil || string(batch.GetResults()[0].GetValue()) != "old" || batch.GetReadEpoch() != got.GetReadEpoch() {
		t.Fatalf("batch: %v, %v", batch, err)
	}
	scan, err := h.kv.Scan(ctx, &pb.ScanRequest{SnapshotTimeUs: at})
	if err != nil {
		t.Fatal(err)
	}
	if page, err := scan.Recv(); err != nil || string(page.GetEntries()[0].GetValue()) != "old" || page.GetReadEpoch() != got.GetReadEpoch() {
		t.Fatalf("scan: %v, %v", page, err)
	}
	_, err = h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: at + uint64(time.Hour.Microseconds())})
	failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_IN_FUTURE, "time_us", "now_us")
	_, err = h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: 1})
	failureOf(t, err).want(t, codes.OutOfRange, pb.ErrorReason_ERROR_REASON_SNAPSHOT_GONE, "time_us", "oldest", "oldest_time_us")
	_, err = h.kv.Get(ctx, &pb.GetRequest{Key: key, SnapshotTimeUs: at, SnapshotEpoch: 1})
	failureOf(t, err).want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_REQUEST)
}

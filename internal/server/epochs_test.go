package server

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/vfs"
)

// scanOnce returns what a scan brings, or its error.
func (h *harness) scanOnce(t testing.TB, r *pb.ScanRequest) (*pb.ScanResponse, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(testContext(t))
	defer cancel()
	stream, err := h.kv.Scan(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	return stream.Recv()
}

// TestWhatWasSeenBeforeACrashNeverNamesAnotherCommit: a client has seen asynchronous commits that a
// crash takes back: their epochs, a token and a read epoch. After the crash other commits are
// made, as many and more. Nothing that the client holds means one of those.
func TestWhatWasSeenBeforeACrashNeverNamesAnotherCommit(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.SyncInterval, c.ProbeInterval = time.Minute, 0 }) // nothing writes to a disk that is off
	durable := pb.Durability_DURABILITY_SYNC
	kept, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("kept"), Value: []byte("1"), Durability: durable})
	if err != nil {
		t.Fatal(err)
	}
	disk := h.disk.Crash(1, vfs.SurviveNone) // the machine is off: what this server does from here on is not on the disk
	h.fill(t, 10)
	lost := h.get(t, "005")
	newest := h.get(t, "009").GetEpoch()
	all := func() *pb.ScanRequest {
		return &pb.ScanRequest{PageBytes: 1, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL, Limit: 3}
	}
	page, err := h.scanOnce(t, all())
	if err != nil || len(page.ResumeToken) == 0 {
		t.Fatalf("%v, %v", page, err)
	}

	after := mustStartOn(t, disk)
	r := after.store.Recovery()
	if uint64(r.Epoch) != kept.Epoch || uint64(r.Next) <= newest {
		t.Fatalf("recovered up to %d, continues at %d; %d was durable and %d was seen", r.Epoch, r.Next, kept.Epoch, newest)
	}
	status, err := after.admin.Status(testContext(t), &pb.StatusRequest{})
	if err != nil || status.Recovery.GetEpoch() != kept.Epoch || status.Recovery.GetNextEpoch() != uint64(r.Next) {
		t.Errorf("the status tells %v, %v", status.GetRecovery(), err)
	}
	if e := after.put(t, "005", "other"); e != uint64(r.Next) {
		t.Errorf("the first commit is %d, want %d", e, r.Next)
	}
	for i := range 20 {
		if e := after.put(t, fmt.Sprintf("new-%d", i), "x"); e <= newest {
			t.Fatalf("epoch %d was given out before", e)
		}
	}

	for e := kept.Epoch + 1; e <= newest; e++ {
		_, err := after.kv.Get(testContext(t), &pb.GetRequest{Key: []byte("005"), SnapshotEpoch: e})
		if failureOf(t, err).code != codes.OutOfRange {
			t.Errorf("a snapshot of epoch %d, which is lost: %v", e, err)
		}
		if _, err = after.scanOnce(t, &pb.ScanRequest{SnapshotEpoch: e}); failureOf(t, err).code != codes.OutOfRange {
			t.Errorf("a scan of epoch %d, which is lost: %v", e, err)
		}
	}
	_, err = after.kv.Put(testContext(t), &pb.PutRequest{
		Key: []byte("005"), Value: []byte("swapped"),
		Preconditions: []*pb.Precondition{{Key: []byte("005"), Condition: &pb.Precondition_EpochEquals{EpochEquals: lost.GetEpoch()}}},
	})
	failureOf(t, err).want(t, codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_PRECONDITION_FAILED, "condition", "epoch", "index", "key")

	again := all()
	again.ResumeToken = page.ResumeToken
	if _, err := after.scanOnce(t, again); failureOf(t, err).code != codes.OutOfRange {
		t.Errorf("a token of a lost epoch: %v", err)
	}
	if got := after.get(t, "005"); string(got.GetValue()) != "other" {
		t.Errorf("got %v", got)
	}
}

// TestTokenOfAnotherStoreIsRefused: epochs of another store are other commits, whatever their
// numbers.
func TestTokenOfAnotherStoreIsRefused(t *testing.T) {
	one, other := mustStart(t), mustStart(t)
	one.fill(t, 10)
	other.fill(t, 10)
	request := func() *pb.ScanRequest { return &pb.ScanRequest{Limit: 3, Tokens: pb.ResumeTokens_RESUME_TOKENS_ALL} }
	page, err := one.scanOnce(t, request())
	if err != nil || len(page.ResumeToken) == 0 {
		t.Fatalf("%v, %v", page, err)
	}
	for _, newest := range []bool{false, true} {
		r := request()
		r.ResumeToken, r.ResumeAtNewest = page.ResumeToken, newest
		_, err := other.scanOnce(t, r)
		f := failureOf(t, err)
		f.want(t, codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_FOREIGN_RESUME_TOKEN)
		if f.field != "resume_token" {
			t.Errorf("field %q", f.field)
		}
		if page, err := one.scanOnce(t, r); err != nil || !slices.Equal(keysOf([]*pb.ScanResponse{page}), numbered(3, 6)) {
			t.Errorf("its own store: %v, %v", keysOf([]*pb.ScanResponse{page}), err)
		}
	}

	// The identity outlives a restart, and so does a token, as far as its epoch is still readable.
	if err := one.stop(); err != nil {
		t.Fatal(err)
	}
	restarted := mustStartOn(t, one.disk)
	r := request()
	r.ResumeToken, r.ResumeAtNewest = page.ResumeToken, true
	if page, err := restarted.scanOnce(t, r); err != nil || !slices.Equal(keysOf([]*pb.ScanResponse{page}), numbered(3, 6)) {
		t.Errorf("after a restart: %v", err)
	}
}

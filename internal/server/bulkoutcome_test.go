package server

import (
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestOutcomeOfABulkLoadWhoseSuperblockFailsIsUnknown: the superblock may be on the device, so a
// restart may find the bulk load, and the error must not say that nothing was loaded. An error before
// says so.
func TestOutcomeOfABulkLoadWhoseSuperblockFailsIsUnknown(t *testing.T) {
	unknown := 0
	for skip := range 12 {
		h := mustStart(t)
		stream, err := h.kv.BulkLoad(testContext(t))
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.Send(&pb.BulkLoadRequest{Entries: []*pb.BulkEntry{{Key: []byte("k"), Value: []byte("v")}}}); err != nil {
			t.Fatal(err)
		}
		h.faults.Inject(vfs.Rule{Op: vfs.OpAnySync, Name: "*.ekv", Nth: skip + 1, Sticky: true, Err: syscall.EIO})
		_ = stream.Send(&pb.BulkLoadRequest{Commit: true})
		if _, err = stream.CloseAndRecv(); err == nil {
			break
		}
		f := failureOf(t, err)
		if f.reason == pb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN.Reason() {
			f.want(t, codes.Internal, pb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, "epoch", "cause")
			unknown++
		}
		_ = h.stop()
	}
	if unknown < 2 { // of the pages, or the superblock
		t.Errorf("%d failed syncs make the outcome unknown", unknown)
	}
}

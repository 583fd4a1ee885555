package server

import (
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCommitThatWaitsForTheDiskIsAnsweredByADrain: a server that begins to drain while an executed
// commit waits for the disk answers the commit before it ends the stream. SHUTTING_DOWN instead of
// the answer would say that nothing was executed, and clients would run the transaction twice.
func TestCommitThatWaitsForTheDiskIsAnsweredByADrain(t *testing.T) {
	h := mustStart(t)
	h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Delay: 300 * time.Millisecond})
	k := h.talk(t)
	k.must(beginRequest(&pb.BeginRequest{Durability: pb.Durability_DURABILITY_SYNC}))
	k.must(txnPutRequest("k", "v"))
	if err := k.stream.Send(commitRequest); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the commit is visible", func() bool { return h.store.Visible() > 0 })
	var stopped sync.WaitGroup
	defer stopped.Wait()
	stopped.Go(func() { _ = h.stop() })
	out, err := k.hear()
	if err != nil || out.GetCommit().GetEpoch() == 0 {
		t.Fatalf("the answer of an executed commit: %v, %v", out, err)
	}
	_, err = k.hear()
	failureOf(t, err).want(t, codes.Unavailable, pb.ErrorReason_ERROR_REASON_SHUTTING_DOWN)
}

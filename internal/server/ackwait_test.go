package server

import (
	"context"
	"errors"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// endsMeanwhile is a context that ends after the wait with it has begun, and wakes no wait itself: what is waited for
// fails at the same moment.
type endsMeanwhile struct {
	context.Context
	begun bool
}

func (c *endsMeanwhile) Done() <-chan struct{} { return nil }

func (c *endsMeanwhile) Err() error {
	if c.begun {
		return context.Canceled
	}
	c.begun = true
	return nil
}

// TestWriteWhoseLogFailsHasAnUnknownOutcome although its context has ended as well: the write was
// executed, and an answer that it was refused would let its client execute it again.
func TestWriteWhoseLogFailsHasAnUnknownOutcome(t *testing.T) {
	h := mustStart(t)
	h.faults.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log"})
	put, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Durability: pb.Durability_DURABILITY_ASYNC})
	if err != nil {
		t.Fatal(err)
	}
	for write, want := range map[bool]pb.ErrorReason{
		true: pb.ErrorReason_ERROR_REASON_OUTCOME_UNKNOWN, false: pb.ErrorReason_ERROR_REASON_READ_ONLY,
	} {
		ctx := &endsMeanwhile{Context: testContext(t)}
		err := ackWait{epoch: keys.Epoch(put.Epoch), durability: mvcc.DurabilitySync, write: write}.wait(ctx, h.store)
		if got := classify(err).reason; got != want || errors.Is(err, context.Canceled) {
			t.Errorf("write %t: %v with the reason %v, want %v", write, err, got, want)
		}
		if ctx.Err() == nil {
			t.Error("the context has not ended: this tests nothing")
		}
	}
}

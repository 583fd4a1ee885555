//go:build invariants

package mvcc

import (
	"context"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSyncWriteIsAcknowledgedOnlyWhenVisible: a SYNC write that is durable is not acknowledged while a neighbour with a
// smaller epoch, whose record is durable, too, is not installed: a read after the acknowledgement would miss it.
func TestSyncWriteIsAcknowledgedOnlyWhenVisible(t *testing.T) {
	s := mustOpen(t, quiet(vfs.NewMem()))
	x, other := mustSession(t, s), mustSession(t, s)
	defer x.Close()
	defer other.Close()
	h := haltAtStep(t, other, stepCopied, asyncPut(other, "neighbour", "slow"))
	w := Write{Durability: DurabilitySync}
	w.Set([]byte(elsewhere(s, "neighbour")), []byte("1"))
	epoch, err := x.Commit(t.Context(), &w)
	if err == nil {
		err = s.AwaitDurable(t.Context(), epoch)
	}
	if err != nil {
		t.Fatal(err)
	}
	acknowledged := func(ctx context.Context) error { return s.Wait(ctx, epoch, DurabilitySync) }
	if ends(false, acknowledged) {
		t.Error("a durable write was acknowledged before it was visible")
	}
	if end := h.end(); end.err != nil {
		t.Fatal(end.err)
	}
	if !ends(true, acknowledged) {
		t.Error("a durable and visible write was not acknowledged")
	}
}

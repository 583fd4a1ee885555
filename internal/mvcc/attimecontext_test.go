package mvcc

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAStateAtATimeNeedsItsContext: a look-up that has not read all that it needs gives no answer.
func TestAStateAtATimeNeedsItsContext(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Retention = time.Hour
	s := mustOpen(t, o)
	mustPut(t, s, "k", "v")
	time.Sleep(3 * time.Millisecond)
	at := s.Clock().Now() - 1
	time.Sleep(3 * time.Millisecond)
	mustPut(t, s, "k", "v")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if e, err := s.EpochAt(ctx, at); !errors.Is(err, context.Canceled) {
		t.Errorf("epoch %d, %v", e, err)
	}
}

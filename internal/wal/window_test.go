package wal

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestEpochsDoNotRunAwayFromDurable: a segment whose epochs could be EpochWindow past durable is not begun before more is durable, or a start after a crash
// could give out an epoch that was seen before it.
func TestEpochsDoNotRunAwayFromDurable(t *testing.T) {
	for _, c := range []struct {
		ahead   keys.Epoch
		refused bool
	}{{EpochWindow, true}, {EpochWindow - 1, true}, {EpochWindow - SegmentBytesMin, false}} {
		a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
		a.cur.Load().Seal()
		first := a.log.Durable() + c.ahead
		a.log.rotate.Lock()
		a.log.skipped = first // as if so many epochs had been given out
		a.log.rotate.Unlock()
		patience := time.Minute
		if c.refused {
			patience = 30 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err := a.log.NewSegment(ctx, first, 0)
		cancel()
		if refused := errors.Is(err, context.DeadlineExceeded); refused != c.refused || !refused && err != nil {
			t.Errorf("a segment that begins %d epochs past durable: %v", c.ahead, err)
		}
	}
}

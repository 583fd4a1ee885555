package wal

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestEpochsDoNotRunAwayFromDurable: a segment whose epochs could be EpochWindow past durable does not begin before more is
// durable. Otherwise a start after a crash could give out an epoch that a client saw before the crash.
func TestEpochsDoNotRunAwayFromDurable(t *testing.T) {
	for _, c := range []struct {
		ahead   keys.Epoch
		refused bool
	}{{EpochWindow, true}, {EpochWindow - 1, true}, {EpochWindow - SegmentBytesMin, false}} {
		a := mustStart(t, testOptions(vfs.NewMem(), SegmentBytesMin))
		a.cur.Load().Seal()
		first := a.log.Durable() + c.ahead
		a.log.rotation.mu.Lock()
		a.log.rotation.skipped = first // as if so many epochs had been given out
		a.log.rotation.mu.Unlock()
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

// TestOversizedSegmentOfAnotherWriterStaysInTheWindow: a writer that waits for an oversized segment gives up, and another
// rotation gets the segment while durable lags. It could hold more epochs than the window allows.
func TestOversizedSegmentOfAnotherWriterStaysInTheWindow(t *testing.T) {
	const segment, body, lag = 256 << 10, 1 << 20, 8000
	faulty := vfs.NewFaulty(vfs.NewMem())
	a := mustStart(t, testOptions(faulty, segment))
	most := keys.Epoch(spaceFor(body) / recordHeaderSize)
	a.log.window = most + lag/2
	within(t, a.log.Prepare(body, false).Done(), "an attempt to prepare an oversized segment")
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: FileName(1), Fault: vfs.Slow, Until: until})
	for i := range uint64(lag) {
		a.mustAppend(t, bodyOf(i, 8))
	}
	reservation, outcome := a.cur.Load().Seal()
	if outcome != Crossed {
		t.Fatal(outcome)
	}
	attempt := a.log.Prepare(0, false)
	if attempt == nil {
		t.Fatalf("epoch %d could be given out while %d is durable; the window is %d", reservation.Epoch+most, a.log.Durable(), a.log.window)
	}
	release()
	for ; attempt != nil; attempt = a.log.Prepare(0, false) {
		within(t, attempt.Done(), "an attempt to prepare")
	}
	if _, err := a.log.NewSegment(t.Context(), reservation.Epoch, 0); err != nil {
		t.Fatal(err)
	}
}

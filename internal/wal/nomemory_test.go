package wal

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestNoMemoryForTheNextBufferIsTriedAgain: several times in a row, the system has no memory for the buffers of the next
// segments, of standard size and larger. Each time the writer gets an error and nothing is lost; no epoch is given out
// without a buffer.
func TestNoMemoryForTheNextBufferIsTriedAgain(t *testing.T) {
	fs := vfs.NewMem()
	o := testOptions(fs, 64<<10)
	o.Buffers = 8
	a := mustStart(t, o)
	waitForPreallocated(t, a.log)
	a.log.preallocator.mu.Lock()
	ready := len(a.log.preallocator.ready)
	a.log.preallocator.mu.Unlock()
	var refusals atomic.Int64
	refusals.Store(6)
	a.log.buffers.obtain = func(int) error {
		if refusals.Add(-1) >= 0 {
			return syscall.ENOMEM
		}
		return nil
	}
	attempt := a.log.Prepare(200<<10, false)
	<-attempt.Done()
	if attempt.Err() == nil || a.log.Prepare(0, false) != nil {
		t.Errorf("others have no segment after %v", attempt.Err())
	}
	refusals.Store(6)
	for _, size := range []int{20 << 10, 200 << 10} { // the second needs a segment of its own size
		refused := 0
		for range 4 * (ready + 2) {
			s := a.cur.Load()
			c, outcome := s.Reserve(size)
			for outcome == Crossed {
				next, err := a.log.NewSegment(context.Background(), c.Epoch, size)
				if errors.Is(err, syscall.ENOMEM) && !errors.Is(err, ErrFailed) {
					refused++
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				a.cur.Store(next)
				c, outcome = next.Reserve(size)
				s = next
			}
			if outcome != Reserved {
				t.Fatalf("outcome %d", outcome)
			}
			copy(s.Body(c), bodyOf(uint64(c.Epoch), size))
			s.Publish(c)
			if err := a.log.Flush(c.Epoch); err != nil {
				t.Fatal(err)
			}
		}
		if size > 64<<10 && refused == 0 || refusals.Load() == 6 { // buffers of the standard size may come back in time for the writer
			t.Errorf("no writer of %d bytes was refused: the test checks nothing", size)
		}
		refusals.Store(6)
	}
	if a.log.Stats().PrepareFailures == 0 {
		t.Error("no failure was counted")
	}
	last := a.log.Durable()
	mustClose(t, a.log)
	if _, got := mustReplay(t, fs.Crash(1, vfs.SurviveNone), 0); got.last() != last {
		t.Errorf("the log ends at %d, want %d", got.last(), last)
	}
}

package wal

import (
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestBuffersOfLargeSegmentsAreBounded: on a device whose syncs are slow, smaller records get the segments that are made for a large one, again
// and again. Besides the standard buffers, the log has the one that is filled, and one more that is flushed or ready.
func TestBuffersOfLargeSegmentsAreBounded(t *testing.T) {
	const segmentBytes, largeBytes, smallBytes, rounds = 64 << 10, 4 << 20, 100 << 10, 20
	faulty := vfs.NewFaulty(vfs.NewMem())
	a := mustStart(t, testOptions(faulty, segmentBytes))
	faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Delay: 20 * time.Millisecond})
	peak := int64(0)
	for range rounds {
		a.cur.Load().Seal()
		for attempt := a.log.Prepare(largeBytes, false); attempt != nil; attempt = a.log.Prepare(largeBytes, false) {
			within(t, attempt.Done(), "an attempt to prepare")
			if err := attempt.Err(); err != nil {
				t.Fatal(err)
			}
		}
		a.mustFollow(t, smallBytes)
		peak = max(peak, a.log.Stats().BufferBytes)
	}
	if most := int64(BuffersMin*segmentBytes + 2*spaceFor(largeBytes)); peak > most {
		t.Errorf("buffers of %d bytes, want at most %d", peak, most)
	}
	if err := a.log.Flush(a.log.rotation.last.Position().Epoch - 1); err != nil {
		t.Fatal(err)
	}
	if waiting := a.log.preparer.waiting.Load(); waiting != 0 {
		t.Errorf("%d bytes of buffers wait for a flusher that is done", waiting)
	}
	mustClose(t, a.log)
}

// TestALargeSegmentThatWaitsForBuffersHoldsUpNoOther: writers of small records get standard segments meanwhile, also the one that is ready.
func TestALargeSegmentThatWaitsForBuffersHoldsUpNoOther(t *testing.T) {
	const largeBytes, smallBytes = 4 << 20, 1 << 10
	options := testOptions(vfs.NewMem(), 64<<10)
	options.Buffers = 8
	a := mustStart(t, options)
	await := func(bodyBytes int) {
		t.Helper()
		for attempt := a.log.Prepare(bodyBytes, false); attempt != nil; attempt = a.log.Prepare(bodyBytes, false) {
			within(t, attempt.Done(), "an attempt to prepare")
			if err := attempt.Err(); err != nil {
				t.Error(err)
				return
			}
		}
	}
	a.log.preparer.waiting.Store(largeBytes) // as on a device that does not sync
	await(smallBytes)
	large := make(chan struct{})
	go func() {
		defer close(large)
		await(largeBytes)
	}()
	for range 50 {
		await(smallBytes)
		a.cur.Load().Seal()
		a.mustFollow(t, smallBytes)
	}
	a.log.preparer.waiting.Store(0)
	within(t, large, "the writer of the large record")
	mustClose(t, a.log)
}

// mustFollow writes a record into the segment after one that is sealed.
func (a *appender) mustFollow(t *testing.T, bodyBytes int) {
	t.Helper()
	_, first, _ := a.cur.Load().sealedAt()
	if _, err := a.rotate(first, bodyOf(uint64(first), bodyBytes)); err != nil {
		t.Fatal(err)
	}
}

package wal

import (
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestALargeRecordGetsTheSegmentThatIsMadeForIt: other writers of large records that come meanwhile neither have it made anew, nor take it
// away if the device has no room for theirs, nor let an attempt for several of them fail for which it has room. The largest has its turn.
func TestALargeRecordGetsTheSegmentThatIsMadeForIt(t *testing.T) {
	const kib = 1 << 10
	type request struct {
		body  int
		frees bool
	}
	for _, c := range []struct {
		later       []request // what other writers ask for while a segment for 256 KiB is made; a MiB and the reserve are left then
		allocations int
		refused     bool // their attempt
		ready       int  // what finds a segment then
		next        int  // what finds one when that was taken, and another writer has asked for 256 KiB
	}{
		{later: []request{{256 * kib, false}}, allocations: 1, ready: 256 * kib},
		{later: []request{{4096 * kib, true}}, allocations: 2, refused: true, ready: 256 * kib},
		{later: []request{{4096 * kib, false}, {512 * kib, false}}, allocations: 3, ready: 512 * kib},
		{later: []request{{512 * kib, false}, {640 * kib, false}}, allocations: 2, ready: 640 * kib},
		{later: []request{{256 * kib, false}, {640 * kib, false}}, allocations: 1, ready: 256 * kib, next: 640 * kib},
		{later: []request{{800 * kib, false}}, allocations: 2, refused: true, ready: 256 * kib},
		{later: []request{{800 * kib, true}}, allocations: 3, ready: 800 * kib},
		{later: []request{{512 * kib, false}, {800 * kib, true}, {800 * kib, false}}, allocations: 3, ready: 800 * kib},
	} {
		mem := vfs.NewMem()
		faulty := vfs.NewFaulty(mem)
		o := testOptions(faulty, 64*kib)
		o.Reserve = 2
		a := mustStart(t, o)
		if err := a.log.FillReserve(); err != nil {
			t.Fatal(err)
		}
		until := make(chan struct{})
		allocated := faulty.Inject(vfs.Rule{Op: vfs.OpPreallocate, Fault: vfs.Slow, Until: until})
		first, later := a.log.Prepare(256*kib, false), (*Preparation)(nil)
		for allocated.Fired() == 0 {
			runtime.Gosched()
		}
		for _, r := range c.later {
			later = a.log.Prepare(r.body, r.frees)
		}
		mem.LeaveFree(1024 * kib)
		close(until)
		within(t, first.Done(), "the first attempt")
		within(t, later.Done(), "the second attempt")
		if first.Err() != nil || errors.Is(later.Err(), vfs.ErrNoSpace) != c.refused {
			t.Errorf("%v: %v, then %v", c.later, first.Err(), later.Err())
		}
		if n := allocated.Fired(); n != c.allocations || a.log.Prepare(c.ready, false) != nil {
			t.Errorf("%v: %d files were allocated, want %d, or no segment for %d bytes is ready", c.later, n, c.allocations, c.ready)
		}
		if b := a.log.preallocator.takeAssigned(); b != nil {
			if err := errors.Join(b.file.Close(), a.log.buffers.unmap(b.buffer)); err != nil {
				t.Error(err)
			}
		}
		if c.next > 0 {
			within(t, a.log.Prepare(256*kib, false).Done(), "the third attempt")
			if a.log.Prepare(c.next, false) != nil {
				t.Errorf("%v: no segment for %d bytes is ready", c.later, c.next)
			}
		}
		mustClose(t, a.log)
	}
}

// TestABufferThatComesBackIsTakenBesideWriters: a writer that asks for a segment while all buffers are in use gets the first one that comes
// back, though others write to the active segment and wait for each sync.
func TestABufferThatComesBackIsTakenBesideWriters(t *testing.T) {
	faulty := vfs.NewFaulty(vfs.NewMem())
	o := testOptions(faulty, 1<<20)
	o.Buffers = BuffersMin
	a := mustStart(t, o)
	until := make(chan struct{})
	faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Name: FileName(1), Fault: vfs.Slow, Until: until})
	for a.log.Stats().Rotations < BuffersMin-1 {
		a.mustAppend(t, bodyOf(1, 100<<10))
	}
	attempt := a.log.Prepare(0, false)
	faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Fault: vfs.Slow, Delay: time.Millisecond})
	var writers sync.WaitGroup
	ended := make(chan struct{})
	for range 4 {
		writers.Go(func() {
			for range 1000 {
				select {
				case <-ended:
					return
				default:
				}
				if _, err := a.put(bodyOf(1, 100)); err != nil {
					t.Error(err)
					return
				}
			}
			t.Error("the writer had no segment before the others ended")
		})
	}
	a.awaitQueued(3) // and one flushes, perhaps
	close(until)
	within(t, attempt.Done(), "the attempt")
	close(ended)
	writers.Wait()
	if err := attempt.Err(); err != nil {
		t.Error(err)
	}
}

// Package throttle computes how much to delay writers, so that memory for immutable memtables need not
// run out and stop them.
//
// Memory becomes free only when a merge ends, and the tree decides how long that takes: neighbouring keys
// are merged at hundreds of MB/s; random keys in a tree larger than memory at a few MB/s, because each of
// them rewrites a page. So the delay is measured and not configured. Two values decide it:
//
//	backlog   memory in use, minus the part that the running merge has already processed. It changes
//	          smoothly, while memory falls in steps. Up to Free of memory, writers are not delayed.
//	          From there on the delay rises linearly; at Free + band of memory a KiB costs a writer
//	          what it costs a merge, so writers and merges keep step.
//	deadline  remaining time of the running merge ÷ memory that is free until it ends: the least delay.
//	          In step it is below the delay of the backlog. It decides where a merge takes longer than
//	          those before it.
//
// A caller that needs writers to be slower than merges for a while sets a floor of the delay.
//
// A writer waits for its own KiB, times the number of waiting writers. So all writers together are not
// faster than merges, each gets the same share whatever the size of its commits, and none waits in a
// queue after a large commit.
//
// The package has no clock and starts nothing: the caller passes the time in, updates the delay when
// memory is taken, freed or processed, and lets writers sleep.
package throttle

import (
	"sync/atomic"
	"time"
)

const (
	// freeShare is the part of the memory for immutable memtables that may be used before writers are delayed. A checkpoint is
	// running by then in any case. Merges take about as much, and the memory for as much again must suffice until they end, also if
	// that is half again as long as expected.
	freeShare = 5.0 / 16
	// freeShareLarge is that part of memory of largeBytes and more, of which what writers commit between two looks at the delay is a
	// small part.
	freeShareLarge = 6.0 / 16
	largeBytes     = 64 << 20
	// WaitMax is the longest wait for one commit. A commit of a MiB, or one among a thousand writers, may
	// take that.
	WaitMax = 5 * time.Second
	// FloorMax is the largest floor of the delay, for each KiB.
	FloorMax = 25 * time.Millisecond

	// band is how much further the backlog grows, as a part of memory, until writers are as slow as merges.
	band = 1.0 / 16
	// delayUnknown is the delay there, in nanoseconds for each KiB, before a merge was measured: 10 MB/s.
	delayUnknown = float64(100 * time.Microsecond)
	// delayMax keeps the arithmetic in range.
	delayMax = float64(time.Second)
	// measuredMin is how many bytes a merge must process for its duration to be used.
	measuredMin = 256 << 10
	// ownRateShare is the part of a merge, as one over it, from which on only its own rate predicts its end.
	ownRateShare = 16
	// updateEvery is how often the progress of a merge changes the delay.
	updateEvery = 20 * time.Millisecond
)

// begin is a time from which monotonic ones are counted: a step of the wall clock changes nothing.
var begin = time.Now()

// Throttle is the delay of writers. The zero value delays nothing.
type Throttle struct {
	delay   atomic.Int64 // nanoseconds for each KiB; 0: none
	Merged  atomic.Int64 // versions that the running merge has processed
	updated atomic.Int64 // nanoseconds from begin to the last update for the progress of a merge

	// Guarded by the mutex of the caller: see the methods with Locked in their name.
	mergeNanos float64   // duration of the merges so far, and
	mergeKiB   float64   // what they processed, both weighted: the latest merge counts as much as all before
	began      time.Time // when the running merge began; zero without one
	bytes      int64     // of the memtables that it processes
	versions   int64     // in those memtables
	floor      int64     // of the delay, in nanoseconds for each KiB, until the running merge ends
}

func share(limit int64) float64 {
	if limit >= largeBytes {
		return freeShareLarge
	}
	return freeShare
}

// Free is how many bytes of so much memory may be used before writers are delayed.
func Free(limit int64) int64 { return int64(share(limit) * float64(limit)) }

// Delay is what each KiB costs a writer now; zero while merges keep up.
func (t *Throttle) Delay() time.Duration { return time.Duration(t.delay.Load()) }

// Owed is the wait of a writer that owed so much and has committed so many bytes, with so many other writers
// waiting.
func (t *Throttle) Owed(before time.Duration, bytes, waiting int64) time.Duration {
	cost := float64(t.delay.Load()) * float64(bytes) / 1024 * float64(waiting+1)
	return before + time.Duration(min(cost, float64(WaitMax)))
}

// BeginMergeLocked notes that a merge of so many bytes of memtables, in so many versions, begins.
func (t *Throttle) BeginMergeLocked(bytes, versions int64, now time.Time) {
	t.began, t.bytes, t.versions = now, bytes, versions
	t.Merged.Store(0)
}

// MergingLocked is how many bytes of memtables the running merge processes; zero without one.
func (t *Throttle) MergingLocked() int64 {
	if t.began.IsZero() {
		return 0
	}
	return t.bytes
}

// Processed notes that the running merge has processed so many versions more. It reports whether it is
// time to update the delay; of several goroutines one gets true.
func (t *Throttle) Processed(versions int, now time.Time) (update bool) {
	t.Merged.Add(int64(versions))
	last, at := t.updated.Load(), int64(now.Sub(begin))
	return at-last >= int64(updateEvery) && t.updated.CompareAndSwap(last, at)
}

// MeasureMergeLocked notes that the running merge has done its work, whose duration predicts later ones.
func (t *Throttle) MeasureMergeLocked(now time.Time) {
	if t.bytes >= measuredMin {
		t.mergeNanos = t.mergeNanos/2 + float64(now.Sub(t.began))
		t.mergeKiB = t.mergeKiB/2 + float64(t.bytes)/1024
	}
}

// EndMergeLocked notes that the merge failed, or that its memory is free now.
func (t *Throttle) EndMergeLocked() { t.began, t.floor = time.Time{}, 0 }

// SetFloorLocked sets the least delay until the running merge ends, whatever memory is in use: at most FloorMax.
// UpdateLocked applies it.
func (t *Throttle) SetFloorLocked(perKiB time.Duration) { t.floor = int64(min(perKiB, FloorMax)) }

// UpdateLocked computes the delay for so many bytes of memory in use, of limit.
func (t *Throttle) UpdateLocked(used, limit int64, now time.Time) {
	done, left := t.progress(now)
	backlog := float64(used) - done*float64(t.bytes)
	over := min(backlog/float64(limit), 1) - share(limit)
	if over <= 0 {
		t.delay.Store(t.floor)
		return
	}
	free := float64(max(limit-used, limit/256, 1024))
	t.delay.Store(max(t.floor, int64(min(max(t.mergeNanosPerKiB()*over/band, left/(free/1024)), delayMax))))
}

// mergeNanosPerKiB is what recent merges took for a KiB.
func (t *Throttle) mergeNanosPerKiB() float64 {
	if t.mergeKiB == 0 {
		return delayUnknown
	}
	return t.mergeNanos / t.mergeKiB
}

// progress is the part of its work that the running merge has done, and how many nanoseconds the rest will
// take, predicted from its own rate and from the merges before it; zeros without one. When all versions are
// processed, the last pages are still to be written and two syncs to be done.
func (t *Throttle) progress(now time.Time) (done, left float64) {
	if t.began.IsZero() {
		return 0, 0
	}
	elapsed := float64(now.Sub(t.began))
	done = min(float64(t.Merged.Load())/float64(max(t.versions, 1)), 1)
	before := max(t.mergeNanosPerKiB()*float64(t.bytes)/1024-elapsed, 0)
	left = before
	if done > 0 {
		known := min(done*ownRateShare, 1)
		left = known*elapsed*(1-done)/done + (1-known)*before
	}
	return done, max(left, elapsed/8)
}

package storage

import (
	"context"
	"sync/atomic"
	"time"
)

// flow slows writers in time, so that they need not be stopped. Memory comes free only when a merge ends, and that takes as long as the
// tree makes it: keys that lie close together are merged at hundreds of MB/s, random ones into a tree larger than memory at a few, because
// each of them rewrites a page. So the pace is measured, not set, and two things decide it:
//
//	backlog   memory in use, less the share of it that the merge under way has got through. It changes smoothly, while memory falls in steps.
//	          Up to slack nobody waits. From there on a KiB costs writers more and more; at slack + paceBand of memory it costs what it
//	          costs a merge, so that there the two keep step, with merges of that size and memory for as much again.
//	deadline  time that the merge will yet take ÷ memory that is free until then: the least that a KiB may cost. In step it is less than the
//	          above; it counts where a merge takes longer than those before.
//
// A writer waits for his own KiB, times the writers who wait: so together they write no faster than the pace, each gets the same share whatever the
// size of his commits, and nobody waits in a line behind a large one.
type flow struct {
	pace    atomic.Int64 // nanoseconds that a KiB costs at present; 0: nothing
	waiting atomic.Int64 // writers who do
	hurry   atomic.Bool  // nobody is to wait any more

	merged  atomic.Int64 // versions that the merge under way has got through
	pressed atomic.Int64 // unix nanoseconds when it last changed the pace

	// Guarded by Engine.mu.
	took     float64   // nanoseconds that merges took, and
	tookIn   float64   // KiB that they took in, both with the later ones weighing more
	began    time.Time // of the merge under way; zero without one
	taking   int64     // bytes of memtables that it takes in
	versions int64     // in those
}

const (
	// slack is the part of the memory for frozen generations that may be used before writers wait; then a checkpoint is under way in any case.
	slack = 5.0 / 16
	// paceBand is how much further the backlog goes until writers are no faster than merges.
	paceBand = 1.0 / 16
	// paceUnknown is the pace there while no merge has told how long it takes: 10 MB/s.
	paceUnknown = float64(100 * time.Microsecond)
	// paceMax keeps the arithmetic in range.
	paceMax = float64(time.Second)
	// paceWaitMax is the longest wait for one commit. A megabyte, or a thousand writers, may take that.
	paceWaitMax = 5 * time.Second
	// paceStep is how long nobody looks whether the pace has become better meanwhile.
	paceStep = 50 * time.Millisecond
	// paceWaitMin is the least that is waited for: less is owed until the next commit, since a timer would take longer.
	paceWaitMin = 500 * time.Microsecond
	// nodeBytes is about what a version takes in a memtable beside key and value.
	nodeBytes = 64
	// measuredMin is how much a merge must take in for its time to tell anything.
	measuredMin = 256 << 10
	// knownShare is the part of a merge, as one over it, from which on its own speed tells alone when it will end.
	knownShare = 16
	// pressEvery is how often a merge's progress changes the pace.
	pressEvery = 20 * time.Millisecond
)

// beginLocked notes that a merge takes in so many bytes, in so many versions.
func (f *flow) beginLocked(bytes, versions int64, now time.Time) {
	f.began, f.taking, f.versions = now, bytes, versions
	f.merged.Store(0)
}

// measureLocked notes that the merge under way has done its work.
func (f *flow) measureLocked(now time.Time) {
	if f.taking >= measuredMin {
		f.took, f.tookIn = f.took/2+float64(now.Sub(f.began)), f.tookIn/2+float64(f.taking)/1024
	}
}

// endLocked notes that what the merge took in counts no more, or that it failed.
func (f *flow) endLocked() { f.began = time.Time{} }

// perKiB is the nanoseconds that merges took for a KiB lately.
func (f *flow) perKiB() float64 {
	if f.tookIn == 0 {
		return paceUnknown
	}
	return f.took / f.tookIn
}

// pressLocked sets the pace for so much memory in use of a limit.
func (f *flow) pressLocked(used, limit int64, now time.Time) {
	done, left := f.progress(now)
	backlog := float64(used) - done*float64(f.taking)
	over := min(backlog/float64(limit), 1) - slack
	if over <= 0 {
		f.pace.Store(0)
		return
	}
	free := float64(max(limit-used, limit/256, 1024))
	f.pace.Store(int64(min(max(f.perKiB()*over/paceBand, left/(free/1024)), paceMax)))
}

// progress is the share of its work that the merge under way has done, and how many nanoseconds the rest will take, by what it did so far
// and by those before; zeros without one. Once all versions are merged there is the rest of the pages to write, and two syncs.
func (f *flow) progress(now time.Time) (done, left float64) {
	if f.began.IsZero() {
		return 0, 0
	}
	elapsed := float64(now.Sub(f.began))
	done = min(float64(f.merged.Load())/float64(max(f.versions, 1)), 1)
	before := max(f.perKiB()*float64(f.taking)/1024-elapsed, 0)
	left = before
	if done > 0 {
		known := min(done*knownShare, 1)
		left = known*elapsed*(1-done)/done + (1-known)*before
	}
	return done, max(left, elapsed/8)
}

// owes is what a writer owes who owed debt, after so many bytes, while so many wait.
func (f *flow) owes(debt time.Duration, bytes, waiting int64) time.Duration {
	cost := float64(f.pace.Load()) * float64(bytes) / 1024 * float64(waiting+1)
	return debt + time.Duration(min(cost, float64(paceWaitMax)))
}

// Pay lets a writer wait after a commit of so many operations and bytes, if checkpoints fall behind. He should hold nothing meanwhile. When the
// pace becomes better, so does what is left of his wait. A context that ends, ends it too: the next commit of w, which may be another client's,
// then owes no more than a step of it.
func (e *Engine) Pay(ctx context.Context, w *Writer, operations, bytes int) {
	f := &e.flow
	pace := f.pace.Load()
	if pace == 0 || f.hurry.Load() {
		return
	}
	w.debt = f.owes(w.debt, int64(bytes+nodeBytes*operations), f.waiting.Load())
	if w.debt < paceWaitMin {
		return
	}
	f.waiting.Add(1)
	defer f.waiting.Add(-1)
	for w.debt >= paceWaitMin {
		start := time.Now()
		if !w.sleep(ctx, min(w.debt, paceStep)) {
			w.debt = min(w.debt-time.Since(start), paceStep)
			return
		}
		w.debt = max(w.debt-time.Since(start), -paceWaitMin)
		if now := f.pace.Load(); now < pace {
			w.debt, pace = time.Duration(float64(w.debt)*float64(now)/float64(pace)), now
		}
		if !e.merging.Load() || f.hurry.Load() {
			w.debt = min(w.debt, 0) // nothing is under way that it would be worth waiting for
		}
	}
}

// sleep returns after a time, or with false when the context has ended.
func (w *Writer) sleep(ctx context.Context, d time.Duration) bool {
	if ctx.Done() == nil {
		time.Sleep(d)
		return true
	}
	if w.timer == nil {
		w.timer = time.NewTimer(d)
	} else {
		w.timer.Reset(d)
	}
	select {
	case <-w.timer.C:
		return true
	case <-ctx.Done():
		w.timer.Stop()
		return false
	}
}

// Hurry ends all waits for the pace: no new work comes, and what is there is to end.
func (e *Engine) Hurry() { e.flow.hurry.Store(true) }

// Pace is what each KiB costs the writers at present.
func (e *Engine) Pace() time.Duration { return time.Duration(e.flow.pace.Load()) }

// behind reports whether writers wait for checkpoints, which then do nothing but what makes room.
func (e *Engine) behind() bool { return e.flow.pace.Load() > 0 }

// checkpointAt is how many bytes in frozen generations start a checkpoint: before anybody waits.
func (e *Engine) checkpointAt() int64 {
	return min(e.options.CheckpointBytes, int64(slack*float64(e.frozenBytes.Load())))
}

// pressLocked is called whenever there is more memory in use, or less.
func (e *Engine) pressLocked(now time.Time) {
	e.flow.pressLocked(e.frozenBytesOf(e.view.Load()), e.frozenBytes.Load(), now)
}

// flowBegins notes that a merge begins. publish, or flowFails, ends it.
func (e *Engine) flowBegins(job *mergeJob) {
	versions := int64(job.entries)
	for _, g := range job.frozen {
		versions += int64(g.mem.Versions())
	}
	now := time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.flow.beginLocked(residentBytes(job.frozen), versions, now)
	e.pressLocked(now)
}

// flowGoesOn notes that the merge under way has got through so many versions.
func (e *Engine) flowGoesOn(versions int) {
	f := &e.flow
	f.merged.Add(int64(versions))
	now := time.Now()
	last := f.pressed.Load()
	if now.UnixNano()-last < int64(pressEvery) || !f.pressed.CompareAndSwap(last, now.UnixNano()) {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pressLocked(now)
}

// flowMeasured notes that the merge under way has done its work, whose time tells about those to come.
func (e *Engine) flowMeasured() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.flow.measureLocked(time.Now())
}

// flowFails notes that the merge under way has come to nothing.
func (e *Engine) flowFails() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.flow.endLocked()
	e.pressLocked(time.Now())
}

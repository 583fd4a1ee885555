package storage

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/storage/throttle"
)

const (
	// throttleStep is how long a delayed writer sleeps before it looks whether the delay became smaller.
	throttleStep = 50 * time.Millisecond
	// throttleWaitMin is the shortest wait: less is owed until the next commit, because a timer takes longer.
	throttleWaitMin = 500 * time.Microsecond
	// throttleWaitMinEnds is that of writers whose commits are small and which no client waits for: on a busy machine a timer is late by
	// more than they owe for one commit.
	throttleWaitMinEnds = 10 * time.Millisecond
	// nodeBytes is about what a version takes in a memtable beside key and value.
	nodeBytes = 64
)

// throttling delays writers by what package throttle computes. Engine.mu guards the arithmetic.
type throttling struct {
	throttle.Throttle
	clients atomic.Int64 // writers that are delayed
	ending  atomic.Int64 // writers with Writer.Ends that are delayed
	stopped atomic.Bool  // StopThrottling was called
	due     atomic.Bool  // what waits has the size of a merge, which was asked for; written under Engine.mu
}

// Throttle delays a writer after a commit of so many operations and bytes. It does so while checkpoints lag, if a
// merge runs or is due, or if merges fail. The writer should hold nothing that others wait for. When the delay
// becomes smaller, so does the rest of the wait. The end of ctx ends the wait, too: the next commits of w, which may be those of other clients, then repay at most
// one step of it, and each no more than it costs itself: a small one waits twice as long as it would. It returns how long the writer has waited.
//
// Writers that end what clients have left (Writer.Ends) share a part of their own, as large as that of all clients together. With the share of a few
// among very many they would delete less than clients write, for ever.
func (e *Engine) Throttle(ctx context.Context, w *Writer, operations, bytes int) (waited time.Duration) {
	t := &e.throttling
	waiting, waitMin := &t.clients, throttleWaitMin
	if w.Ends {
		waiting, waitMin = &t.ending, throttleWaitMinEnds
	}
	delay := t.Delay()
	if delay == 0 || t.stopped.Load() || !e.mergeHelps() && e.checkpoints.blocked.Load() == nil {
		return 0
	}
	cost := t.Owed(0, int64(bytes+nodeBytes*operations), waiting.Load())
	repaid := min(w.delayLeft, cost)
	w.delayLeft -= repaid
	w.delayOwed += cost + repaid
	if w.delayOwed < waitMin {
		return 0
	}
	waiting.Add(1)
	defer waiting.Add(-1)
	for w.delayOwed >= waitMin {
		start := time.Now()
		slept := w.sleep(ctx, min(w.delayOwed, throttleStep))
		took := time.Since(start)
		waited += took
		if !slept {
			w.delayLeft, w.delayOwed = min(w.delayLeft+max(w.delayOwed-took, 0), throttleStep), 0
			return waited
		}
		w.delayOwed = max(w.delayOwed-took, -waitMin)
		if now := t.Delay(); now < delay {
			w.delayOwed, delay = time.Duration(float64(w.delayOwed)*float64(now)/float64(delay)), now
		}
		if !e.mergeHelps() || t.stopped.Load() {
			w.delayOwed = min(w.delayOwed, 0) // there is no merge that the wait could help
		}
	}
	return waited
}

// mergeHelps reports whether a merge runs, or will as soon as what is before it has ended.
func (e *Engine) mergeHelps() bool { return e.checkpoints.merging.Load() || e.throttling.due.Load() }

// dueLocked reports whether what waits to be merged, without what is being merged, has the size of a merge.
func (e *Engine) dueLocked() bool {
	frozen := e.view.Load().immutables
	return len(frozen) > 0 && residentBytes(frozen)-e.throttling.MergingLocked() >= e.checkpointAt()
}

// requestIfDue asks for the merge that is due. A merge that is due delays writers, so it must have been asked for.
func (e *Engine) requestIfDue() {
	if e.throttling.due.Load() {
		e.checkpoints.request()
	}
}

// throttleLimit is how much memory is in use when writers are stopped: when the active memtable, which counts, is full, and the immutable
// ones with it take more than they may have. Memory for a part of a memtable is of no use.
func (m *memory) throttleLimit() int64 {
	immutable := m.immutableBytes.Load()
	return immutable - max(immutable, 0)%m.memtableBytes + m.memtableBytes
}

// sleep returns true after d, and false when ctx has ended.
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

// StopThrottling ends all delays: no new work comes, and the work under way should end.
func (e *Engine) StopThrottling() { e.throttling.stopped.Store(true) }

// ThrottleDelayPerKiB is what each KiB costs writers now.
func (e *Engine) ThrottleDelayPerKiB() time.Duration { return e.throttling.Delay() }

// lagging reports whether checkpoints are slower than writers. Checkpoints then only do what frees memory. Where there is memory for few memtables,
// the active one alone causes a delay as soon as all of it was touched. No merge can change that, so checkpoints do the rest of their work.
func (e *Engine) lagging() bool { return e.throttling.Delay() > 0 && e.merges(e.view.Load()) }

// mergeWorkers is how many goroutines a merge should have now. While writers are delayed, processors are idle.
func (e *Engine) mergeWorkers() int {
	switch {
	case e.options.CheckpointWorkers > 0:
		return e.options.CheckpointWorkers
	case e.throttling.Delay() > 0:
		return runtime.GOMAXPROCS(0)
	default:
		return max(1, runtime.GOMAXPROCS(0)/2)
	}
}

// checkpointAt is how many bytes in immutable memtables start a checkpoint: before a writer is delayed.
func (e *Engine) checkpointAt() int64 {
	return min(e.options.CheckpointBytes, throttle.Free(e.memory.immutableBytes.Load()))
}

// updateThrottleLocked is called whenever memory is taken or becomes free.
func (e *Engine) updateThrottleLocked(now time.Time) {
	e.throttling.UpdateLocked(e.immutableBytesOf(e.view.Load()), e.memory.throttleLimit(), now)
	e.throttling.due.Store(e.dueLocked())
}

// throttleBegin notes that a merge begins. publish, or throttleFail, ends it.
func (e *Engine) throttleBegin(job *mergeJob) {
	versions := int64(job.entries)
	for _, g := range job.immutables {
		versions += int64(g.mem.Versions())
	}
	now := time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.throttling.BeginMergeLocked(residentBytes(job.immutables), versions, now)
	e.updateThrottleLocked(now)
}

// throttleAtLeast delays writers by no less for each KiB, until the running merge ends.
func (e *Engine) throttleAtLeast(perKiB time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.throttling.SetFloorLocked(perKiB)
	e.updateThrottleLocked(time.Now())
}

// throttleProgress notes that the running merge has processed so many versions more.
func (e *Engine) throttleProgress(versions int) {
	now := time.Now()
	if !e.throttling.Processed(versions, now) {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.updateThrottleLocked(now)
}

// throttleMeasure notes that the running merge has done its work, whose duration predicts later ones.
func (e *Engine) throttleMeasure() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.throttling.MeasureMergeLocked(time.Now())
}

// throttleFail notes that the running merge failed.
func (e *Engine) throttleFail() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.throttling.EndMergeLocked()
	e.updateThrottleLocked(time.Now())
}

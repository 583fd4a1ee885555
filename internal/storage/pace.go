package storage

import (
	"sync/atomic"
	"time"
)

// flow slows writers in time, so that they need not be stopped. Memory comes free only when a checkpoint ends, and that takes as long as the
// tree makes it: keys that lie close together are merged at hundreds of MB/s, random ones into a tree larger than memory at a few, because
// each of them rewrites a page. So the pace is measured, not set:
//
//	pace = time until the checkpoint ends, by what the last ones took ÷ memory that is free until then
//
// All writers share one account: whatever their number, together they write no faster than that. Nobody waits longer than paceWaitMax for one
// commit, however short memory is; what that lets through is little against what is free.
type flow struct {
	pace atomic.Int64 // nanoseconds that a KiB costs at present; 0: nothing
	paid atomic.Int64 // unix nanoseconds up to which the writes so far have used up the time

	// Guarded by Engine.mu.
	perKiB int64     // nanoseconds that checkpoints took for a KiB lately; 0: not known yet
	began  time.Time // of the checkpoint under way; zero without one
	taking int64     // bytes of memtables that it takes in
}

const (
	// paceUnknown is the pace at which memory is nearly full while no checkpoint has told how long it takes: 10 MB/s.
	paceUnknown = 100 * time.Microsecond
	// paceMax keeps the arithmetic in range.
	paceMax = int64(time.Second)
	// paceWaitMax bounds what one commit waits for the pace.
	paceWaitMax = 50 * time.Millisecond
	// paceWaitMin is the least that is waited for: less stays on the account, since a timer would take longer.
	paceWaitMin = 500 * time.Microsecond
	// nodeBytes is about what a version takes in a memtable beside key and value.
	nodeBytes = 64
	// measuredMin is how much a checkpoint must take in for its time to tell anything.
	measuredMin = 256 << 10
)

// beginLocked notes that a checkpoint takes in so many bytes.
func (f *flow) beginLocked(bytes int64, now time.Time) { f.began, f.taking = now, bytes }

// endLocked notes that it is through, or that it failed.
func (f *flow) endLocked(done bool, now time.Time) {
	if done && f.taking >= measuredMin {
		last := int64(now.Sub(f.began)) * 1024 / f.taking
		if f.perKiB == 0 {
			f.perKiB = last
		}
		f.perKiB = (f.perKiB + last) / 2
	}
	f.began = time.Time{}
}

// pressLocked sets the pace for so much memory in use of a limit. Below half of it nobody waits.
func (f *flow) pressLocked(used, limit int64, now time.Time) {
	free := max(limit-used, limit/256, 1024)
	switch {
	case used < limit/2:
		f.pace.Store(0)
	case f.perKiB == 0:
		f.pace.Store((used - limit/2) * int64(paceUnknown) / max(limit/2, 1))
	case f.began.IsZero(): // one is about to begin, and will take what there is
		f.pace.Store(min(f.perKiB*(used/1024)/(free/1024), paceMax))
	default:
		elapsed := int64(now.Sub(f.began))
		left := max(f.perKiB*(f.taking/1024)-elapsed, elapsed/4) // late already: by a quarter more, then
		f.pace.Store(min(left/(free/1024), paceMax))
	}
}

// owed charges a write to the account, and says how long its writer should wait.
func (f *flow) owed(bytes int64, now int64) time.Duration {
	pace := f.pace.Load()
	if pace == 0 {
		return 0
	}
	for {
		paid := f.paid.Load()
		due := max(paid, now-int64(paceWaitMin)) + min(pace*bytes/1024, int64(paceWaitMax))
		due = min(due, now+int64(paceWaitMax))
		if f.paid.CompareAndSwap(paid, due) {
			if wait := time.Duration(due - now); wait >= paceWaitMin {
				return wait
			}
			return 0
		}
	}
}

// Owed is how long a writer should wait after a commit of so many operations and bytes, outside all locks, because checkpoints fall behind.
func (e *Engine) Owed(operations, bytes int) time.Duration {
	if e.flow.pace.Load() == 0 {
		return 0
	}
	return e.flow.owed(int64(bytes+nodeBytes*operations), time.Now().UnixNano())
}

// Pace is what each KiB costs the writers at present.
func (e *Engine) Pace() time.Duration { return time.Duration(e.flow.pace.Load()) }

// pressLocked is called whenever there is more memory in use, or less.
func (e *Engine) pressLocked(v *view) {
	e.flow.pressLocked(e.frozenBytesOf(v), e.frozenBytes.Load(), time.Now())
}

// flowBegins and flowEnds enclose a merge.
func (e *Engine) flowBegins(job *mergeJob) {
	bytes := int64(0)
	for _, g := range job.frozen {
		bytes += int64(g.mem.Bytes())
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.flow.beginLocked(bytes, time.Now())
	e.pressLocked(e.view.Load())
}

func (e *Engine) flowEnds(err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.flow.endLocked(err == nil, time.Now())
	e.pressLocked(e.view.Load())
}

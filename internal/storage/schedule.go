package storage

import (
	"math"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// Work is what a checkpoint should do now.
type Work int

const (
	// WorkNone means that nothing is worth a checkpoint.
	WorkNone Work = iota
	// WorkMerge means that Checkpoint should merge the immutable memtables. With none, it moves pages from the end of
	// the file or removes dead versions from the tree.
	WorkMerge
	// WorkRotateAndMerge means that Rotate should make the active memtable immutable first.
	WorkRotateAndMerge
)

const (
	// immutableWaitMax is how long an immutable memtable waits to be merged together with later ones, and
	// immutableWaitIdle how long it does while nothing is written. Readers look into each of them.
	immutableWaitMax  = 10 * time.Second
	immutableWaitIdle = time.Second
	// largePart is the part of the keys of the tree, as one over it, that makes an active memtable large.
	largePart = 8
)

// Schedule computes what the next checkpoint should do. It is called every second or so. An active memtable
// that is large in proportion to the tree is merged before it is full, once it has waited for largeWait. The
// snapshots are the epochs that versions must be kept for.
func (e *Engine) Schedule(largeWait time.Duration, snapshots []keys.Epoch) Work {
	idle := e.idle()
	alone := idle || len(e.view.Load().immutables) == 0 // else immutable memtables would be merged for the sake of other work
	switch {
	case e.Shortage() != nil && e.rotatable():
		return WorkRotateAndMerge // frees pages and log segments
	case e.shouldFlushBySize(largeWait):
		return WorkRotateAndMerge
	case e.shouldFlushByAge(idle), alone && (e.shrinkable() || e.vacuumable(snapshots)):
		return WorkMerge
	default:
		return WorkNone
	}
}

// CheckpointRequests delivers when there is something to merge.
func (e *Engine) CheckpointRequests() <-chan struct{} { return e.checkpoints.requests }

// RequestCheckpoint makes CheckpointRequests deliver.
func (e *Engine) RequestCheckpoint() { e.checkpoints.request() }

// shouldFlushByAge reports whether the newest immutable memtable has waited long enough. While commits come,
// more memtables will follow, and a merge of several writes each page of the tree once.
func (e *Engine) shouldFlushByAge(idle bool) bool {
	wait := immutableWaitMax
	if idle {
		wait = immutableWaitIdle
	}
	return len(e.view.Load().immutables) > 0 && e.sinceRotation() > wait
}

// sinceRotation is how long ago the last rotation was; very long without one.
func (e *Engine) sinceRotation() time.Duration {
	if at := e.memory.rotated.Load(); at != nil {
		return time.Since(*at)
	}
	return math.MaxInt64
}

// idle reports whether nothing was committed since its last call.
func (e *Engine) idle() bool {
	last := keys.Epoch(0)
	if segment := e.view.Load().active.segment; segment != nil { // else a bulk load is being completed
		_, last, _ = segment.Extent()
	}
	return e.checkpoints.lastScheduled.Swap(uint64(last)) == uint64(last)
}

// shouldFlushBySize reports whether the active memtable is large and has waited for so long. Without it, the
// space of what was deleted or overwritten would stay in use until the interval ends.
func (e *Engine) shouldFlushBySize(wait time.Duration) bool {
	return e.sinceRotation() > wait && e.pager.Stats().Live >= smallTreePages &&
		uint64(e.view.Load().active.mem.Versions())*largePart > e.pager.State().Entries
}

// shrinkable reports whether the data file is more than half as large again as its live pages, so that
// checkpoints should move pages from its end although no memtable is full. Moving and truncating end below
// that: they leave holes of an eighth and two growth steps of a sixteenth, in a small file relocatePagesMin
// pages and two steps of sixteen.
func (e *Engine) shrinkable() bool {
	if e.checkpoints.fileEnd.stuck.Load() {
		return false
	}
	s := e.pager.Stats()
	return (s.FileBytes-e.reservedPages())/int64(s.PageSize) > int64(s.Live)*3/2+2*relocatePagesMin
}

// fileEnd is what checkpoints try to move from the end of the data file. Damaged pages do not move, and the
// pages for the disk reserve and for the memtables are no remains of a larger tree: a file end that stayed as it
// was is left alone until it changes. Otherwise every second a checkpoint would look for pages to move and
// find none.
type fileEnd struct {
	before, now fileEndState
	stuck       atomic.Bool
}

type fileEndState struct {
	limit page.ID
	pages int
}

// begin returns the page from which on pages should move in this checkpoint; zero for none.
func (t *fileEnd) begin(ck *pager.Checkpoint, relocate int) page.ID {
	t.now = fileEndState{limit: ck.RelocateFrom(relocate)}
	if t.now.limit > 0 {
		t.now.pages = len(ck.LiveFrom(t.now.limit))
	}
	if t.now == t.before {
		return 0
	}
	return t.now.limit
}

// end notes that the checkpoint is durable, while so many pages wait for readers. These may leave holes that
// pages can move to, and a shorter file, when the readers end.
func (t *fileEnd) end(pending uint64) {
	t.stuck.Store(t.now == t.before && (t.now.limit > 0 || pending <= relocatePagesMin))
	t.before = t.now
}

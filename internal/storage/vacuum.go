package storage

import (
	"slices"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

const (
	// vacuumLeavesMin is how many leaves a checkpoint may look into for garbage whatever it costs: under a millisecond of work.
	vacuumLeavesMin = 64
	// vacuumLeavesMax bounds what a sweep adds to a checkpoint: 16 MiB of default pages to read, and as much to write.
	vacuumLeavesMax = 2048
	// vacuumCheckpoints is in how many checkpoints a tree would be swept that holds nothing but stale versions; the smaller their share, the more.
	vacuumCheckpoints = 16
	// vacuumYieldMin is how many leaves may be read for each that something can be dropped from, before the sweep slows down.
	vacuumYieldMin = 8
)

// sweeper lets checkpoints find the versions in the tree that nobody needs any more and that no new version of a key brings a merge to: those
// that a snapshot held when their leaf was last written, those that retention held, and those that a bulk load replaced.
//
// It goes round and round through the stale leaves, some at each checkpoint. A whole lap under one and the same set of live epochs
// leaves nothing that can be dropped under that set, so the sweeper rests until the set changes. It needs no memory of what it saw
// or of what merges left: the pages themselves tell how much below them is stale.
//
// Invariant: while it rests, every merge since the last lap began had live as its live epochs, or was a bulk load; behind a load visible moves
// on, and with it the set.
type vacuum struct {
	// Owned by the checkpoint.
	next      page.Separator // where the lap goes on; the zero Separator is the tree's begin
	snapshots []keys.Epoch   // of the last checkpoint
	unchanged bool           // live has not changed since the lap began
	resting   bool
	leaves    int  // to be read at the next checkpoint
	known     bool // share was read

	deadVersions atomic.Uint32 // page.Share of the newest root
	read, passes atomic.Uint64 // leaves looked into; laps ended
}

// observe notes under which live epochs a checkpoint works.
func (s *vacuum) observe(live []keys.Epoch) {
	if !slices.Equal(live, s.snapshots) {
		s.snapshots = append(s.snapshots[:0], live...)
		s.unchanged, s.resting = false, false
	}
}

// idle reports whether there is nothing to look for under these live epochs.
func (s *vacuum) idle(live []keys.Epoch) bool {
	return s.deadVersions.Load() == 0 || s.resting && slices.Equal(live, s.snapshots)
}

// budget is how many leaves the next search may read: in proportion to the share of garbage, and few where few of them were worth it.
func (s *vacuum) budget(treePages uint64) int {
	most := int(page.DeadRatio(s.deadVersions.Load()).Ratio() * float64(treePages) / vacuumCheckpoints)
	s.leaves = max(min(s.leaves, most, vacuumLeavesMax), vacuumLeavesMin)
	return s.leaves
}

// advance moves on behind what a search has found, once that is gone from the tree.
func (s *vacuum) advance(found *btree.DeadVersions) {
	if found == nil {
		return
	}
	s.read.Add(uint64(found.Read))
	if found.Leaves*vacuumYieldMin < found.Read {
		s.leaves /= 2
	} else {
		s.leaves *= 2
	}
	if found.Next != nil {
		s.next = *found.Next
		return
	}
	s.next = page.Separator{}
	s.resting = s.unchanged
	s.passes.Add(1)
}

// vacuumable reports whether a checkpoint may find garbage in the tree though nothing is frozen: checkpoints that merge look for it anyway.
func (e *Engine) vacuumable(live []keys.Epoch) bool {
	if len(e.view.Load().immutables) > 0 || !e.checkpoints.mu.TryLock() {
		return false
	}
	defer e.checkpoints.mu.Unlock()
	if !e.checkpoints.vacuum.known {
		e.readDeadVersionRatio(e.view.Load().root)
	}
	return !e.checkpoints.vacuum.idle(live)
}

// readDeadVersionRatio notes how much of the tree is stale. An error is for those to report who read the tree for its data.
func (e *Engine) readDeadVersionRatio(root btree.Root) {
	e.checkpoints.vacuum.known = true
	if share, err := btree.DeadVersionRatio(pagesource.NewMerge(e.pager), root); err == nil {
		e.checkpoints.vacuum.deadVersions.Store(uint32(share))
	}
}

// findDeadVersions looks into the next few stale leaves. Nil means that it did not. While checkpoints fall behind writers it is left to later ones.
// The checkpointing mutex is held.
func (e *Engine) findDeadVersions(h *GCWatermarks) *btree.DeadVersions {
	s, v := &e.checkpoints.vacuum, e.view.Load()
	if !s.known {
		e.readDeadVersionRatio(v.root)
	}
	s.observe(h.Snapshots)
	if s.idle(h.Snapshots) || e.lagging() {
		return nil
	}
	if s.next.Key == nil {
		s.unchanged = true
	}
	search := btree.VacuumSearch{
		Policy: h.policy(), From: s.next, Max: s.budget(e.pager.Stats().Live),
		Damaged: func(err error) error {
			if !IsDamage(err) {
				return err
			}
			e.counters.damaged.Add(1)
			return nil
		},
	}
	if e.Shortage() != nil { // what is found is rewritten at once, which must fit into the free pages
		free, _ := e.pager.FreeBytes()
		search.Max = min(search.Max, max(1, int(free/int64(e.options.PageSize))/stepShare))
	}
	search.Avoid = v.repairTree.Avoid()
	found, err := search.Find(pagesource.NewMerge(e.pager), v.root)
	if err != nil {
		return nil // a device that cannot be read will be heard of; nothing is lost but time
	}
	return found
}

package storage

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

const (
	// vacuumLeavesMin is how many leaves a checkpoint may always read for dead versions: less than a millisecond of work.
	vacuumLeavesMin = 64
	// vacuumLeavesMax bounds what the vacuum adds to a checkpoint: 16 MiB of default pages to read, and as much to write.
	vacuumLeavesMax = 2048
	// vacuumCheckpoints is in how many checkpoints a tree of only dead versions is vacuumed; the lower the ratio, the more.
	vacuumCheckpoints = 16
	// vacuumYieldMin is how many leaves may be read for each leaf with dead versions, before the vacuum slows down.
	vacuumYieldMin = 8
)

// vacuum lets checkpoints find dead versions in leaves of the tree to which no new version brings a merge: versions that a
// snapshot needed when their leaf was last written, those that retention kept, and those that a bulk load replaced.
//
// It passes again and again over the leaves with superseded versions, some at each checkpoint. After a complete pass under
// one set of snapshot epochs nothing is left that can be dropped under that set, so the vacuum rests until the set changes.
// It does not remember what it has read: the pages themselves have the dead-version ratio of what is below them.
//
// Invariant: while it rests, every merge since the last pass began had snapshots as its snapshot epochs, or was a bulk load;
// after a bulk load visible moves, and the set with it.
type vacuum struct {
	// Owned by the checkpoint.
	next      page.Separator // where the pass continues; the zero Separator is the begin of the tree
	snapshots []keys.Epoch   // of the last checkpoint
	unchanged bool           // snapshots has not changed since the pass began
	resting   bool
	leaves    int  // to be read at the next checkpoint
	known     bool // share was read

	deadVersions atomic.Uint32 // page.Share of the newest root
	read, passes atomic.Uint64 // leaves read; passes completed
}

// observe records the snapshot epochs of a checkpoint.
func (s *vacuum) observe(live []keys.Epoch) {
	if !slices.Equal(live, s.snapshots) {
		s.snapshots = append(s.snapshots[:0], live...)
		s.unchanged, s.resting = false, false
	}
}

// idle reports whether no dead versions can be found under these snapshot epochs.
func (s *vacuum) idle(live []keys.Epoch) bool {
	return s.deadVersions.Load() == 0 || s.resting && slices.Equal(live, s.snapshots)
}

// budget is how many leaves the next search may read: in proportion to the dead-version ratio, and few where few of the last
// ones had dead versions.
func (s *vacuum) budget(treePages uint64) int {
	most := int(page.DeadRatio(s.deadVersions.Load()).Ratio() * float64(treePages) / vacuumCheckpoints)
	s.leaves = max(min(s.leaves, most, vacuumLeavesMax), vacuumLeavesMin)
	return s.leaves
}

// advance continues after the leaves that a search has found, once the checkpoint has rewritten them.
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

// vacuumable reports whether a checkpoint may find dead versions in the tree although no memtable is immutable: checkpoints
// that merge look for them anyway.
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

// readDeadVersionRatio records the dead-version ratio of the tree. An error is ignored: the next reader of the page gets it.
func (e *Engine) readDeadVersionRatio(root btree.Root) {
	e.checkpoints.vacuum.known = true
	if share, err := btree.DeadVersionRatio(pagesource.NewMerge(&e.pager.Reader), root); err == nil {
		e.checkpoints.vacuum.deadVersions.Store(uint32(share))
	}
}

// findDeadVersions reads the next few leaves with superseded versions. It returns nil if it
// read none. While checkpoints are lagging, it leaves these leaves to later checkpoints.
// checkpointState.mu is held.
func (e *Engine) findDeadVersions(ctx context.Context, h *GCWatermarks) *btree.DeadVersions {
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
		Policy: h.policy(e.pager.State().Epoch), From: s.next, Max: s.budget(e.pager.Stats().Live),
		Damaged: func(err error) error {
			if !IsDamage(err) {
				return err
			}
			e.counters.damaged.Add(1)
			return nil
		},
	}
	if e.Shortage() != nil { // the leaves are rewritten at once, which must fit into the free pages
		free, _ := e.pager.FreeBytes()
		search.Max = min(search.Max, max(1, int(free/int64(e.options.PageSize))/stepShare))
	}
	search.Avoid = v.repairTree.Avoid()
	found, err := search.Find(ctx, pagesource.NewMerge(&e.pager.Reader), v.root)
	if err != nil {
		return nil // a later reader gets the error; dead versions stay a little longer
	}
	return found
}

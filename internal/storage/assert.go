package storage

import (
	"errors"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// Assertions compare what two places of the engine say about the same thing. They run where views are replaced, where
// checkpoints are committed and where memory is accounted for: a few times a second at most, so they stay in production
// builds. A broken invariant stops the store there, and panics in builds with the tag invariants. Only the assertion on
// the commit path, in reserveIn, is left out of production builds.

// errInvariant matches every broken invariant.
var errInvariant = errors.New("broken invariant")

// broken stops the store because of an invariant that does not hold, and returns the final error. A nil error is ignored.
func (e *Engine) broken(err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("%w: %w", errInvariant, err)
	if invariants.Enabled {
		panic("storage: " + err.Error())
	}
	if e.log == nil { // Open has not got so far, and fails
		return err
	}
	return e.log.Fail(err)
}

// checkOldest verifies that merged are the oldest of the immutable generations, so that no other one leaves the view.
func checkOldest(immutables, merged []*generation) error {
	if newer := len(immutables) - len(merged); newer < 0 || !slices.Equal(immutables[newer:], merged) {
		return fmt.Errorf("%d generations were merged that are not the oldest of the %d in the view", len(merged), len(immutables))
	}
	return nil
}

// setViewLocked lets readers see the next view.
func (e *Engine) setViewLocked(next *view) {
	if old := e.view.Load(); old != nil && (next.checkpoint < old.checkpoint || next.inTree < old.inTree) {
		_ = e.broken(fmt.Errorf("the view goes back from checkpoint %d at epoch %d to %d at %d",
			old.checkpoint, old.inTree, next.checkpoint, next.inTree))
	}
	_ = e.broken(next.check())
	e.view.Store(next)
}

// check verifies that the epochs of the generations are disjoint and ascending, and newer than those in the tree.
func (v *view) check() error {
	newer := v.active
	for _, g := range v.immutables {
		if !g.sealed() {
			return fmt.Errorf("the immutable generation from epoch %d on is not sealed", g.first)
		}
		if keys.Epoch(g.end.Load()) > newer.first {
			return fmt.Errorf("the generation [%d, %d) overlaps the next one, from %d on", g.first, g.end.Load(), newer.first)
		}
		if err := g.check(); err != nil {
			return err
		}
		newer = g
	}
	if newer.first <= v.inTree {
		return fmt.Errorf("the oldest generation begins at epoch %d, and the tree has all up to %d", newer.first, v.inTree)
	}
	return nil
}

// check verifies that a sealed generation is a range of epochs, and that the log segment has no other epochs.
func (g *generation) check() error {
	end := keys.Epoch(g.end.Load())
	if end < g.first {
		return fmt.Errorf("the generation from epoch %d on ends before %d", g.first, end)
	}
	if g.segment == nil {
		return nil
	}
	if _, last, _ := g.segment.Extent(); last >= end && last > 0 {
		return fmt.Errorf("the generation [%d, %d) has a log segment with epoch %d", g.first, end, last)
	}
	return nil
}

// contains reports whether epoch is in [first, end).
func (g *generation) contains(epoch keys.Epoch) bool {
	end := keys.Epoch(g.end.Load())
	return epoch >= g.first && (end == 0 || epoch < end)
}

// checkCut verifies that a checkpoint does not take the tree back to an earlier epoch.
func checkCut(before, cut keys.Epoch) error {
	if cut < before {
		return fmt.Errorf("a checkpoint takes the tree back from epoch %d to %d", before, cut)
	}
	return nil
}

// checkPool verifies that the memory of tables that are kept for reuse is inside the budget of immutable memtables.
func checkPool(tables int, tableBytes, budget int64) error {
	if int64(tables)*tableBytes > budget {
		return fmt.Errorf("%d pooled memtables of %d bytes exceed the budget of %d bytes", tables, tableBytes, budget)
	}
	return nil
}

// checkRetired verifies that no retired memtable was counted as freed twice.
func checkRetired(bytes int64) error {
	if bytes < 0 {
		return fmt.Errorf("retired memtables have %d bytes", bytes)
	}
	return nil
}

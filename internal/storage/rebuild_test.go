package storage

import (
	"context"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSearchForOrphansKeepsNoPagesOnAFullDisk: the pages that a search pins are those that deletions free. So a search ends
// when the disk becomes full, and is repeated after a later checkpoint.
func TestSearchForOrphansKeepsNoPagesOnAFullDisk(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.disturb = nil
	q.mustOpen()
	q.fill()
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	e, ctx := q.engine, context.Background()
	state, err := e.PinState(ctx)
	if err != nil {
		t.Fatal(err)
	}
	state.ReleaseLog()
	if found, err := state.findOrphans(ctx); err != nil || found.Reads == 0 {
		t.Fatalf("%+v, %v: the tree is too small", found, err)
	}
	e.reserve.shortage.Store(&ShortageError{cause: vfs.ErrNoSpace})
	if found, err := state.findOrphans(ctx); !errors.Is(err, errSearchYields) {
		t.Errorf("a search that is under way goes on: %+v, %v", found, err)
	}
	state.Release()
	pinning, cancel := context.WithCancel(ctx)
	cancel()
	if err := e.searchOrphans(pinning); !errors.Is(err, errSearchYields) {
		t.Errorf("a search begins: %v", err)
	}
	e.reserve.shortage.Store(nil)
	e.rebuilds.later.Store(true)
	q.set("another", "value")
	if err := q.checkpointAt(); err != nil || len(e.rebuilds.requests) != 1 {
		t.Errorf("%d searches are requested after a checkpoint, %v", len(e.rebuilds.requests), err)
	}
	q.mustClose()
}

// TestGivingUpARebuildAfterItsSearchWasRequestedAgain: a checkpoint that frees an abandoned repair tree requests a new search,
// although the next checkpoint still has nodes to rebuild. That one fails.
func TestGivingUpARebuildAfterItsSearchWasRequestedAgain(t *testing.T) {
	q := newQuarantineBench(t, vfs.NewMem())
	q.options.disturb = nil
	q.mustOpen()
	q.fill()
	if err := q.checkpointAt(); err != nil {
		t.Fatal(err)
	}
	e, ctx := q.engine, context.Background()
	for _, failure := range []error{errors.New("as the test wants it"), errRebuildYields} {
		state, err := e.PinState(ctx)
		if err != nil {
			t.Fatal(err)
		}
		e.rebuilds.ready = &readyRebuild{state: state, nodes: []btree.RebuiltNode{{ID: 7, Level: 1}}}
		e.rebuilds.waiting.Store(true)
		e.rebuilds.again()
		if !e.giveUpRebuild(ctx, &mergeJob{}, failure) || e.rebuilds.waiting.Load() {
			t.Error("the rebuild is not given up")
		}
		if reason := e.rebuilds.reasonOf(7); reason == "" {
			t.Errorf("the node is not refused after %v", failure)
		}
	}
	for look, searched := range []bool{true, false, true} { // one merge has yielded
		if e.lookAgain(ctx, look); (e.rebuilds.reasonOf(7) == "") != searched {
			t.Errorf("look %d: searched again: %v", look, !searched)
		}
		e.rebuilds.refuse([]btree.RebuiltNode{{ID: 7, Level: 1}}, "again")
	}
	q.mustClose()
}

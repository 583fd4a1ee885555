package storage

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// Reader is one session's way to read: the engine's newest view, and a source of pages that counts its hits. A Reader is
// not for concurrent use. A session keeps its Reader and uses it again.
type Reader struct {
	engine *Engine
	pages  *pagesource.Reader
}

// NewReader makes a reader.
func (e *Engine) NewReader() *Reader { return &Reader{engine: e, pages: e.pages.NewReader()} }

// treeSource is what reads of keys take the pages of the tree from.
type treeSource interface {
	btree.Source
	btree.BatchSource
}

// source is the source of a view's tree.
func (r *Reader) source(v *view) treeSource {
	if v.repairTree == nil {
		return r.pages
	}
	return v.repairTree.Placed(r.pages, &r.engine.pager.Reader)
}

// ErrWouldWait is the error of a reader that does not wait, where it would wait for the device.
var ErrWouldWait = pagesource.ErrWouldWait

// SetWaits says whether the reader waits for the device, as it does at first. Called by its owner.
func (r *Reader) SetWaits(waits bool) { r.pages.SetWaits(waits) }

// TakeReads returns how many pages of the data file the reader has waited for since the last call, and how long. Called by
// its owner.
func (r *Reader) TakeReads() (pages uint64, took time.Duration) { return r.pages.TakeReads() }

// Flush publishes what the reader has counted, for Stats. Called by its owner at the end of a request.
func (r *Reader) Flush() { r.pages.Flush() }

// engineState lets the prefetcher see what the engine does.
type engineState struct{ engine *Engine }

// Merging implements pagesource.State.
func (s engineState) Merging() bool { return s.engine.checkpoints.merging.Load() }

// Checkpoint implements pagesource.State.
func (s engineState) Checkpoint() uint64 { return s.engine.view.Load().checkpoint }

// RunPrefetch reads ahead for scans until ctx ends.
func (e *Engine) RunPrefetch(ctx context.Context) {
	if e.prefetch != nil {
		e.prefetch.Run(ctx)
	}
}

// beforeLeaf is called when the tree's cursor is about to enter a leaf.
func (c *Cursor) beforeLeaf(t *btree.Cursor, id page.ID, forward, seek bool) {
	if c.leaves++; c.engine.prefetch != nil {
		c.readahead.BeforeLeaf(c.engine.prefetch, c.checkpoint, t, id, forward, seek)
	}
}

// leavesOf estimates how many leaves so many entries in a row touch, 0 for an unknown number. The first entry is anywhere
// in its leaf. A last leaf counts if it is more likely needed than not.
func (e *Engine) leavesOf(entries int) int {
	if entries == 0 {
		return 0
	}
	state, space, r := e.pager.State(), e.pager.Stats(), e.blobs.Stats()
	leaves := space.Live - min(space.Live, r.BlobPages+r.OverflowPages+r.TablePages+space.MapPages)
	if state.Entries == 0 || leaves == 0 {
		return 0
	}
	return 1 + int((uint64(min(entries, entriesMax)-1)*leaves+state.Entries/2)/state.Entries)
}

// entriesMax keeps the arithmetic of leavesOf in range, far above what a scan reads ahead.
const entriesMax = 1 << 20

package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// Some pages of the data file can be restored: a superblock has a copy, the allocation map follows
// from the reachable pages, and the indirection table of the blobs from blob pages and references.
// Damage to one of them is repaired when the store is opened, and reported in Recovery.Repaired.

const (
	missingRemedy = "put the data file back in its place, or restore a backup; kvctl salvage extracts what the log still has"
	fileRemedy    = "restore a backup, or extract what is readable with kvctl salvage; do not change the log"
)

// openBlobs opens the blob store, and rebuilds the indirection table if it is damaged. If the table and the allocation map disagree, the device
// has lost a write of one of them: both are rebuilt.
func (e *Engine) openBlobs() (*blob.Store, error) {
	store, err := blob.Open(&e.pager.Reader)
	if err == nil {
		if err = store.CheckLive(e.mayBeLive); err != nil {
			e.pager.DistrustMap(err)
		}
	}
	if !errors.Is(err, pager.ErrCorrupt) {
		return store, err
	}
	cause := err
	if e.pager.MapDamage() != nil {
		e.pager.DistrustTable()
	}
	var unreadable bitset.Set // live pages, but those of superblocks, of trees, and of the table
	pages := func(but *bitset.Set, each func(id page.ID, buf []byte)) error {
		return e.eachLivePage(but, each, func(id page.ID) {
			if !e.pager.OfSuperblock(id) {
				unreadable.Add(int(id))
			}
		})
	}
	refs := func(each func(page.Ref) error) (complete bool, err error) {
		return e.eachRef(each, func(id page.ID) { unreadable.Remove(int(id)) })
	}
	known := func() blob.Known { return e.knownPages(&unreadable) }
	if store, err = blob.Repair(&e.pager.Reader, pages, e.mayBeLive, refs, known); err != nil {
		return nil, err
	}
	if store.Doubtful() {
		e.repairs.incomplete = append(e.repairs.incomplete, fmt.Sprintf("the indirection table was rebuilt from blob pages and references (%v)", cause))
		return store, nil
	}
	e.repairs.made = append(e.repairs.made, fmt.Sprintf("the indirection table was rebuilt from blob pages and references: %v", cause))
	if e.pager.MapDamage() == nil { // a damaged page of the table does not name those below it, and nothing frees these
		e.pager.DistrustMap(fmt.Errorf("pages may be live for nothing: %w", cause))
	}
	return store, nil
}

// knownPages says what is known about the pages of blobs if these ones could not be read.
func (e *Engine) knownPages(unreadable *bitset.Set) blob.Known {
	if e.pager.MapDamage() == nil {
		if unreadable.Count() == 0 {
			return blob.KnownLive
		}
		return blob.KnownPartly
	}
	buf := vfs.AlignedBuffer(e.pager.PageSize())
	for id := range e.pager.PageCount() {
		if unreadable.Has(int(id)) && !e.pager.IsFree(id, buf) {
			return blob.KnownPartly
		}
	}
	return blob.KnownAll
}

// mayBeLive reports whether a page is live; if the allocation map is damaged, all pages of the state may be.
func (e *Engine) mayBeLive(id page.ID) bool {
	return id < e.pager.PageCount() && (e.pager.MapDamage() != nil || e.pager.IsLive(id))
}

// eachLivePage reads the pages of the state except those in but, and calls each for intact ones and damaged for others. It reads the whole file if the
// allocation map is damaged, too.
func (e *Engine) eachLivePage(but *bitset.Set, each func(id page.ID, buf []byte), damaged func(page.ID)) error {
	buf := vfs.AlignedBuffer(e.pager.PageSize())
	for id := range e.pager.PageCount() {
		if !e.mayBeLive(id) || but.Has(int(id)) {
			continue
		}
		err := pagesource.Read(&e.pager.Reader, id, buf)
		if err == nil {
			each(id, buf)
		} else if !IsDamage(err) {
			return err
		} else {
			damaged(id)
		}
	}
	return nil
}

// eachRef calls each for every reference in the tree and in the repair tree, and damaged for the pages of these that cannot be read. It reports whether
// all leaves could be read.
func (e *Engine) eachRef(each func(page.Ref) error, damaged func(page.ID)) (complete bool, err error) {
	complete = true
	roots, err := e.roots()
	if err != nil {
		return false, err
	}
	for _, root := range roots {
		err := btree.Walk(pagesource.NewDirect(&e.pager.Reader), root, &btree.Visitor{
			Page: func(_ page.ID, level int, p []byte) error {
				if level > 0 {
					return nil
				}
				view := page.Leaf(p).Layout()
				for i := range view.Count() {
					if _, _, inline, large := view.At(i); large {
						if err := each(page.RefOf(inline)); err != nil && !IsDamage(err) {
							return err
						} else if err != nil {
							complete = false
						}
					}
				}
				return nil
			},
			Damaged: func(id page.ID, _ int, _, _ *page.Separator, err error) error {
				if !IsDamage(err) {
					return err
				}
				damaged(id)
				complete = false
				return nil
			},
		})
		if err != nil {
			return false, err
		}
	}
	return complete, nil
}

// roots are the roots of the tree, of the repair tree and of its mirror.
func (e *Engine) roots() ([]btree.Root, error) {
	beside, mirror, err := repairTreeRoots(&e.pager.Reader)
	return []btree.Root{rootOf(e.pager.State()), beside, mirror}, err
}

// rebuildMap rebuilds the allocation map if it is damaged.
func (e *Engine) rebuildMap() error {
	damage := e.pager.MapDamage()
	if damage == nil {
		return nil
	}
	e.checkpoints.mapExact = false
	before := e.pager.Unreadable()
	doubtful := e.blobs.Doubtful()
	if err := e.pager.RebuildMap(func(each func(page.ID) error) (complete bool, err error) {
		defer func() {
			doubtful = doubtful || e.pager.Unreadable() != before // the pages of the map itself do not count
			e.checkpoints.mapExact = complete && err == nil
		}()
		complete, err = e.blobs.Reach(each)
		if err != nil {
			return false, err
		}
		roots, err := e.roots()
		if err != nil {
			return false, err
		}
		for _, root := range roots {
			if root.Empty() {
				continue
			}
			whole, err := e.reach(root.ID, root.Level, each)
			if err != nil {
				return false, err
			}
			complete = complete && whole
		}
		return complete, nil
	}); err != nil {
		return err
	}
	if !doubtful {
		e.repairs.made = append(e.repairs.made, fmt.Sprintf("the allocation map was rebuilt from the tree: %v", damage))
		return nil
	}
	e.repairs.incomplete = append(e.repairs.incomplete, fmt.Sprintf("the allocation map was rebuilt from the tree (%v)", damage))
	e.blobs.RebuildAgain()
	return nil
}

// reach calls each for every page of a subtree. It reads inner nodes only: the pages that they name
// are reachable whether they can be read or not.
func (e *Engine) reach(id page.ID, level int, each func(page.ID) error) (complete bool, err error) {
	if err := each(id); err != nil || level == 0 {
		return err == nil, err
	}
	p, err := pagesource.NewDirect(&e.pager.Reader).Page(id, level)
	if err != nil && !IsDamage(err) {
		return false, err
	}
	if IsDamage(err) || !page.IsTree(p, level) {
		return false, nil
	}
	node := page.Inner(p)
	complete = true
	for i := range node.Count() {
		whole, err := e.reach(node.Child(i), level-1, each)
		if err != nil {
			return false, err
		}
		complete = complete && whole
	}
	return complete, nil
}

// writeRepaired writes what openTables has repaired, once the log has been read: a start that is refused changes nothing. It makes a checkpoint of the
// same state with the rebuilt tables. On a full disk the next checkpoint does it.
func (e *Engine) writeRepaired() error {
	for _, write := range e.repairs.unwritten {
		if err := write(); err != nil {
			return err
		}
	}
	e.repairs.unwritten = nil
	return nil
}

// writeState makes another state of the same pages durable, if the disk has room for it.
func (e *Engine) writeState(state pager.State) error {
	if err := e.commitState(state); !errors.Is(err, vfs.ErrNoSpace) {
		return err
	}
	return nil
}

// commitState makes another state of the same pages durable.
func (e *Engine) commitState(state pager.State) error {
	setMapExact(&state, e.checkpoints.mapExact)
	ck, err := e.pager.Begin()
	if err != nil {
		return err
	}
	defer ck.Abort()
	err = e.blobs.Begin(ck).Finish(context.Background(), 0)
	if err == nil {
		err = ck.Commit(context.Background(), state)
	}
	return err
}

// openOrCreate opens the data file, or creates it if there is no store yet. A log that does not have every epoch from
// the first on proves that there was a data file.
func openOrCreate(o *Options, options pager.Options) (*pager.Pager, error) {
	p, err := pager.Open(o.DataFS, o.dataPath(), options)
	if !errors.Is(err, fs.ErrNotExist) {
		return p, err
	}
	segments, err := wal.Segments(o.FS, o.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err := checkWholeLog(o, segments); err != nil {
		return nil, err
	}
	return pager.Create(o.DataFS, o.dataPath(), o.created(options, segments))
}

// checkWholeLog returns an error unless the log can stand for a data file that is missing. The header of the first
// segment does not tell: a truncated segment keeps its name and its records until it is used again, while later ones
// are already gone.
func checkWholeLog(o *Options, segments []wal.SegmentInfo) error {
	if len(segments) == 0 {
		return nil
	}
	if damage := segments[0].Damage; damage != nil {
		return nil //nolint:nilerr // reported when the log is replayed; a start that crashed may have left it
	}
	missing := &CorruptionError{File: o.dataPath(), Remedy: missingRemedy}
	if first := segments[0].First; first > 1 {
		missing.Reason = fmt.Sprintf("the data file is missing, and the log begins at epoch %d", first)
		return missing
	}
	_, err := wal.Replay(o.FS, o.Dir, 0, wal.Proof{}, func(keys.Epoch, []byte) error { return nil })
	if damage, ok := errors.AsType[*wal.CorruptionError](err); ok {
		missing.Reason = fmt.Sprintf("the data file is missing, and the log is not complete (%v)", damage)
		return missing
	}
	return err
}

// blameSuperblock turns the error of a log that does not reach back to the opened state into the
// right one: if the newest superblock may be damaged, the log is intact, and was truncated after
// the state that this superblock described.
func blameSuperblock(p *pager.Reader, err error) error {
	if _, gap := errors.AsType[*wal.CorruptionError](err); !gap || !p.SuperblockMissing() {
		return TranslateError(err)
	}
	slot := int64(p.Checkpoint()+1) % 2
	return &CorruptionError{
		File: p.Name(), Offset: slot * int64(p.PageSize()), Remedy: fileRemedy,
		Reason: fmt.Sprintf("the superblock after checkpoint %d is damaged, and so is its copy (%v); the log does not reach back to that checkpoint",
			p.Checkpoint(), p.SuperblockDamage()),
	}
}

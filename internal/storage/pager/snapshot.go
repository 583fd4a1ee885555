package pager

import (
	"errors"
	"fmt"
	"math"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// A pager of a snapshot is one pinned checkpoint of a data file: a durable state, read-only, as the file
// itself describes it. It uses nothing that the pager of the open file has in memory. A verification reads
// it, and so does the salvage of a damaged file.
//
// While the pinned checkpoint of an open file is in use, its owner must not let ReuseAllFreed pass it, and
// must name it in ReuseFreed, before the next checkpoint and in every later call. Pages that became live
// after it, or that were freed before it, are not part of it. So the file grows at most by what is left of
// the pinned state, however long it is in use.

// Snapshot returns the newest durable state, without its allocation map (see ReadMap). It also audits the
// space that p has in memory. No checkpoint may be open.
func (p *Pager) Snapshot() (*Pager, error) {
	if !p.open.CompareAndSwap(false, true) {
		return nil, ErrBusy
	}
	defer p.open.Store(false)
	if err := p.space.audit(); err != nil {
		return nil, brokenf("%w", err)
	}
	if n := p.space.taken.Count(); n != 0 {
		return nil, brokenf("%d pages are taken and no checkpoint is open", n)
	}
	p.space.startGeneration(p.Checkpoint())
	state := newSnapshot(p.file, *p.current(), p.fileSize.Load())
	switch survey, err := surveySuperblocks(p.file); { // no checkpoint writes one now
	case errors.Is(err, ErrSuperblocks), errors.Is(err, ErrSuperblockMissing), errors.Is(err, ErrNotDataFile):
		slot := p.current().slot()
		state.faults = []*CorruptError{{File: p.file.Name(), Page: slot, Offset: p.offset(slot), Reason: err.Error()}}
	case err != nil:
		return nil, err
	default:
		state.noteSurvey(survey)
	}
	return state, nil
}

// OpenSnapshot opens the newest durable state of a data file that no other pager has open. It reads only
// the superblocks, not the allocation map. Close closes the file. Errors are those of Open.
func OpenSnapshot(fsys vfs.FS, name string) (*Pager, error) {
	f, err := fsys.Open(name, vfs.ReadOnly)
	if err != nil {
		return nil, fmt.Errorf("pager: %w", err)
	}
	survey, err := surveySuperblocks(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	p := newSnapshot(f, survey.newest, survey.size)
	p.noteSurvey(survey)
	p.repaired = 0
	return p, nil
}

func newSnapshot(f vfs.File, sb superblock, size int64) *Pager {
	p := &Pager{file: f, pageSize: sb.pageSize, space: newSpace(), allocation: &PageArray{kind: ArrayAllocationMap, size: sb.pageSize}}
	p.base.Store(&sb)
	p.building.Store(sb.checkpoint)
	p.fileSize.Store(size)
	p.failure.Store(&errReadOnly)
	p.publishStats()
	return p
}

var errReadOnly = fmt.Errorf("%w: the file was opened for reading only", ErrFailed)

// ReadMap reads the allocation map of a snapshot, which Audit and IsLive need.
func (p *Pager) ReadMap() error {
	sb := p.current()
	if size, need := p.fileSize.Load(), p.offset(sb.pageCount); size < need {
		return fmt.Errorf("%s: %w: %d bytes, %d pages need %d", p.file.Name(), ErrTruncated, size, sb.pageCount, need)
	}
	if err := p.readMap(sb); err != nil {
		return err
	}
	p.publishStats()
	return nil
}

// Name is the data file's name.
func (p *Pager) Name() string { return p.file.Name() }

// OpenRaw opens a file without intact superblocks, as a state of which only the page size is known. With
// zero for the page size it takes the one with which most of the first pages are intact. It is for reading
// single pages. Close closes the file.
func OpenRaw(fsys vfs.FS, name string, pageSize int) (*Pager, error) {
	f, err := fsys.Open(name, vfs.ReadOnly)
	if err != nil {
		return nil, fmt.Errorf("pager: %w", err)
	}
	size, err := f.Size()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	raw := func(pageSize int) *Pager {
		sb := superblock{checkpoint: math.MaxUint64, pageSize: pageSize, pageCount: page.ID(size / int64(pageSize))}
		return newSnapshot(f, sb, size)
	}
	if pageSize != 0 {
		return raw(pageSize), nil
	}
	var best *Pager
	most := 0
	for n := page.SizeMin; n <= page.SizeMax; n *= 2 {
		if p := raw(n); p.intactPages() > most {
			best, most = p, p.intactPages()
		}
	}
	if best == nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", name, ErrNotDataFile), f.Close())
	}
	return best, nil
}

// intactPages counts intact pages among the first thousand.
func (p *Pager) intactPages() int {
	buf, n := vfs.AlignedBuffer(p.pageSize), 0
	for id := page.ID(superblocks); id < min(p.current().pageCount, 1000); id++ {
		if p.ReadPage(id, buf) == nil {
			n++
		}
	}
	return n
}

// IsLive reports whether the allocation map says that page id belongs to the state. ReadMap must come first.
func (p *Pager) IsLive(id page.ID) bool { return p.space.live.Has(int(id)) }

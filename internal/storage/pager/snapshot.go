package pager

import (
	"errors"
	"fmt"
	"math"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// A frozen pager is one durable state of a data file, for reading only, as the file itself tells it: what the pager that keeps the file
// up to date knows in memory has no part in it. It is what a check looks at, and what is left to read of a damaged file.
//
// While a frozen pager of an open file is in use, its owner must not let ReuseAllFreed pass the checkpoint of the state, and must name it in
// ReuseFreed, before the next checkpoint and from then on. What became live after the state was taken, or was freed before, is no part of it, so
// that a file grows by what is left of the state at most, however long it is looked at.

// Snapshot returns the newest durable state, without its allocation map (see LoadMap). It also audits the space that p has in memory. No
// checkpoint may be open.
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

// OpenSnapshot opens the newest durable state of a data file that no other pager has open, without its allocation map, and
// without looking at more than the superblocks. Close closes the file. Errors are those of Open.
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

// ReadMap reads the allocation map of a frozen pager, which Audit and Live need.
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

// OpenRaw opens a file whose superblocks are lost, as a state of which nothing is known but the size of its pages: zero for the size in
// which most of the file's first pages are sound. It is for reading single pages. Close closes the file.
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

// intactPages counts sound pages among the first thousand.
func (p *Pager) intactPages() int {
	buf, n := vfs.AlignedBuffer(p.pageSize), 0
	for id := page.ID(superblocks); id < min(p.current().pageCount, 1000); id++ {
		if p.ReadPage(id, buf) == nil {
			n++
		}
	}
	return n
}

// IsLive reports whether the allocation map, once loaded, says that page id belongs to the state.
func (p *Pager) IsLive(id page.ID) bool { return p.space.live.Has(int(id)) }

package pager

import (
	"errors"
	"fmt"
	"math"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Snapshot is one durable state of a data file, read-only, as the file itself describes it. It uses nothing
// that the pager of the open file has in memory. A verification reads it, and so does the salvage of a
// damaged file.
//
// A snapshot of an open file is a pinned checkpoint. While it is in use, its owner must not let
// ReuseAllFreed pass it, and must name it in ReuseFreed, before the next checkpoint and in every later call.
// Pages that became live after it, or that were freed before it, are not part of it. So the file grows at
// most by what is left of the pinned state, however long it is in use.
//
// A snapshot is for one goroutine at a time, except for the methods of its Reader.
type Snapshot struct {
	Reader
	size int64 // of the file, when the snapshot was made

	// Of the allocation map; nil before ReadMap.
	live       *bitset.Set
	allocation *PageArray

	changes *changes // of the open pager, if the snapshot is for a copy; otherwise nil
}

// Snapshot returns the newest durable state, without its allocation map (see Snapshot.ReadMap). It also
// audits the space that p has in memory. No checkpoint may be open.
func (p *Pager) Snapshot() (*Snapshot, error) { return p.snapshot(nil) }

// CopySnapshot is Snapshot for a copy. From the first one on the pager remembers which pages become live: see Snapshot.ChangedSince.
func (p *Pager) CopySnapshot() (*Snapshot, error) { return p.snapshot(&p.changes) }

func (p *Pager) snapshot(c *changes) (*Snapshot, error) {
	if !p.open.CompareAndSwap(false, true) {
		return nil, ErrBusy
	}
	defer p.open.Store(false)
	if err := p.auditSpace(); err != nil {
		return nil, err
	}
	p.space.startGeneration(p.Checkpoint())
	s := newSnapshot(p.file, *p.current(), p.fileSize.Load())
	switch survey, err := surveySuperblocks(p.file); { // no checkpoint writes one now
	case errors.Is(err, ErrSuperblocks), errors.Is(err, ErrSuperblockMissing), errors.Is(err, ErrNotDataFile):
		slot := p.current().slot()
		s.faults = []*CorruptError{{File: p.file.Name(), Page: slot, Offset: p.offset(slot), Reason: err.Error()}}
	case err != nil:
		return nil, err
	default:
		s.noteSurvey(survey)
	}
	if s.changes = c; c != nil {
		c.cut(s.Checkpoint())
	}
	return s, nil
}

// OpenSnapshot opens the newest durable state of a data file that no pager has open. It reads only the
// superblocks, not the allocation map. Close closes the file. Errors are those of Open.
func OpenSnapshot(fsys vfs.FS, name string) (*Snapshot, error) {
	f, err := fsys.Open(name, vfs.ReadOnly)
	if err != nil {
		return nil, fmt.Errorf("pager: %w", err)
	}
	survey, err := surveySuperblocks(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	s := newSnapshot(f, survey.newest, survey.size)
	s.noteSurvey(survey)
	s.repaired = 0
	return s, nil
}

func newSnapshot(f vfs.File, sb superblock, size int64) *Snapshot {
	s := &Snapshot{Reader: Reader{file: f, pageSize: sb.pageSize}, size: size}
	s.newest.Store(&sb)
	s.building.Store(sb.checkpoint)
	return s
}

// SetCopyName says that a copy of this state was made, and gives it a name that no other copy has.
func (s *Snapshot) SetCopyName(name string) { s.changes.name(s.Checkpoint(), name) }

// ChangedSince returns pages among which are all that this state has and the named copy has not: pages with another id, or with other
// contents. Others are among them, too. It returns false if this process has not made the copy, or made it too long ago.
func (s *Snapshot) ChangedSince(name string) (*bitset.Set, bool) {
	return s.changes.since(name, s.Checkpoint())
}

// ForgetCopies forgets all copies: ChangedSince knows none of them any more.
func (s *Snapshot) ForgetCopies() { s.changes.forgetCopies() }

// Close closes the file of a snapshot that OpenSnapshot or OpenRaw has opened. A snapshot of an open pager
// is not closed.
func (s *Snapshot) Close() error { return s.file.Close() }

// ReadMap reads the allocation map, which Audit, IsLive and LivePages need.
func (s *Snapshot) ReadMap() (err error) {
	sb := s.current()
	if need := s.offset(sb.pageCount); s.size < need {
		return fmt.Errorf("%s: %w: %d bytes, %d pages need %d", s.file.Name(), ErrTruncated, s.size, sb.pageCount, need)
	}
	s.allocation, s.live, err = s.readMap()
	return err
}

// IsLive reports whether the allocation map says that page id belongs to the state.
func (s *Snapshot) IsLive(id page.ID) bool { return s.live.Has(int(id)) }

// LivePages is the number of pages that belong to the state, with the superblocks.
func (s *Snapshot) LivePages() int { return s.live.Count() }

// Audit compares the allocation map with the pages that are reachable. reachable calls its argument once
// for every page that the tree and the blob store reach. Audit adds the map's own pages and the superblocks.
func (s *Snapshot) Audit(reachable func(each func(page.ID) error) error) error {
	return s.auditLive(s.live, s.allocation, reachable)
}

// Unreached returns the live pages that are not among the reachable ones, which are passed as to Audit.
func (s *Snapshot) Unreached(reachable func(each func(page.ID) error) error) (*bitset.Set, error) {
	reached, err := s.reach(s.live, s.allocation, reachable)
	if err != nil {
		return nil, err
	}
	rest := new(bitset.Set)
	for i := range s.live.Len() / 64 {
		if word := s.live.Word(i) &^ reached.Word(i); word != 0 {
			rest.SetWord(i, word)
		}
	}
	return rest, nil
}

// OpenRaw opens a file without intact superblocks, as a state of which only the page size is known. It is for
// reading single pages. Close closes the file.
func OpenRaw(fsys vfs.FS, name string) (*Snapshot, error) {
	f, err := fsys.Open(name, vfs.ReadOnly)
	if err != nil {
		return nil, fmt.Errorf("pager: %w", err)
	}
	size, err := f.Size()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	pageSize, err := pageSizeOf(f, size)
	if err == nil && pageSize == 0 {
		err = fmt.Errorf("%s: %w", name, ErrNotDataFile)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	sb := superblock{checkpoint: math.MaxUint64, pageSize: pageSize, pageCount: page.ID(size / int64(pageSize))}
	return newSnapshot(f, sb, size), nil
}

package pager

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// maxPage bounds page ids: a location in the indirection table has 39 bits for one. With the smallest
// pages that is a quarter of a petabyte.
const maxPage page.ID = 1<<39 - 1

// Options are the parameters of Create and Open.
type Options struct {
	// PageSize is the size of pages. With zero, Open takes the page size of the file.
	PageSize int
	// OnFree, if set, is called for every page before it can be taken again, so that a cache can invalidate
	// it. It is called from Begin and Shrink, and from Abort without OnAbort.
	OnFree func(page.ID)
	// OnAbort, if set, is called in place of OnFree for every page that an aborted checkpoint wrote, the last
	// one first.
	OnAbort func(page.ID)
	// RebuildMap lets Open succeed although the allocation map is damaged: see MapDamage and RebuildMap.
	RebuildMap bool
	// ReadAgain is as if set with Reader.ReadAgain before the superblocks are read.
	ReadAgain func(failed int) bool

	// Format is the version of the format of a file that Create makes, from FormatOldest to FormatNewest. Zero is the oldest.
	Format uint32
	// Engine is the engine's area of its empty states.
	Engine [EngineAreaSize]byte
}

// Pager is an open data file: the reader of its newest durable state, and what makes the next one.
type Pager struct {
	Reader

	onFree, onAbort func(page.ID) // constant after Open

	// Readable at any time.
	reusableAll atomic.Uint64               // argument of the largest ReuseAllFreed
	reusable    atomic.Pointer[reuse]       // argument of the last ReuseFreed
	failure     atomic.Pointer[error]       // what stopped the pager
	fileSize    atomic.Int64                // bytes; written under growMu or by the goroutine that has set open
	open        atomic.Bool                 // a checkpoint or Shrink is running
	stats       atomic.Pointer[spaceCounts] // as of the end of the last checkpoint
	reserve     pageReserve
	resynced    atomic.Bool                                        // the newest superblock is certainly on the device
	written     struct{ pages, submissions, synced atomic.Uint64 } // synced: pages by the begin of the last sync

	mapDamage     atomic.Pointer[error] // why the allocation map cannot be read; nil after RebuildMap
	replacedRoots []page.ID             // of the durable state, which no start may read any more: see RebuildMap

	growMu  sync.Mutex
	syncing sync.Mutex // held by a sync until it is known whether it failed

	// Owned by the open checkpoint, or by the goroutine that has set open.
	space      *space
	allocation *PageArray
	changes    changes  // has a part that others read
	newStoreID [16]byte // of superblocks from now on; zero: the one that the file has
}

// SetStoreID lets the superblocks of later checkpoints have another identity. Until there are two of them, the file cannot be opened.
func (p *Pager) SetStoreID(id [16]byte) { p.newStoreID = id }

// Create makes a data file with an empty state, which is checkpoint 1. An existing file is an error
// (fs.ErrExist). If the process dies during Create, no file has the name.
func Create(fsys vfs.FS, name string, opts Options) (*Pager, error) {
	if !page.ValidSize(opts.PageSize) {
		return nil, fmt.Errorf("pager: page size %d is not a power of two between %d and %d", opts.PageSize, page.SizeMin, page.SizeMax)
	}
	if f, err := fsys.Open(name, vfs.ReadOnly); err == nil {
		return nil, errors.Join(fmt.Errorf("pager: creating %s: %w", name, fs.ErrExist), f.Close())
	}
	if err := writeEmpty(fsys, name, &opts); err != nil {
		return nil, fmt.Errorf("pager: creating %s: %w", name, err)
	}
	return Open(fsys, name, opts)
}

// writeEmpty builds the file under another name and renames it, so that the name means a whole file or
// none.
func writeEmpty(fsys vfs.FS, name string, opts *Options) error {
	building := name + ".new"
	if err := fsys.Remove(building); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := fsys.Open(building, vfs.Create)
	if err != nil {
		return err
	}
	pageSize := opts.PageSize
	sb := superblock{pageSize: pageSize, pageCount: superblocks, state: State{Format: max(opts.Format, FormatOldest), Engine: opts.Engine}}
	if _, err := rand.Read(sb.storeID[:]); err != nil {
		return errors.Join(err, f.Close())
	}
	buf := vfs.AlignedBuffer(superblocks * pageSize)
	for sb.checkpoint = range uint64(superblocks) {
		id := int(sb.slot())
		sb.encode(buf[id*pageSize:(id+1)*pageSize], sb.slot())
	}
	if _, err := f.WriteAt(buf, 0); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := fsys.Rename(building, name); err != nil {
		return err
	}
	err = fsys.SyncDir(path.Dir(name))
	if err != nil { // the next start would find a name that no sync makes durable any more
		err = errors.Join(err, fsys.Remove(name))
	}
	return err
}

// Open opens a data file at its newest durable state.
func Open(fsys vfs.FS, name string, opts Options) (*Pager, error) {
	f, err := fsys.Open(name, vfs.ReadWrite)
	if err != nil {
		return nil, fmt.Errorf("pager: %w", err)
	}
	p, err := open(f, opts)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return p, nil
}

func open(f vfs.File, opts Options) (*Pager, error) {
	survey, err := surveySuperblocks(patientFile{f, opts.ReadAgain})
	if err != nil {
		return nil, err
	}
	if survey.unreadable != nil {
		return nil, survey.unreadable
	}
	sb := survey.newest
	if opts.PageSize != 0 && opts.PageSize != sb.pageSize {
		return nil, fmt.Errorf("%s: %w: %d, expected %d", f.Name(), ErrPageSize, sb.pageSize, opts.PageSize)
	}
	p := &Pager{Reader: Reader{file: f, pageSize: sb.pageSize}, onFree: opts.OnFree, onAbort: opts.OnAbort}
	if p.onFree == nil {
		p.onFree = func(page.ID) {}
	}
	if p.onAbort == nil {
		p.onAbort = p.onFree
	}
	p.ReadAgain(opts.ReadAgain)
	p.newest.Store(&sb)
	p.reusable.Store(new(reuse))
	p.building.Store(sb.checkpoint)
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	if need := p.offset(sb.pageCount); size < need {
		return nil, fmt.Errorf("%s: %w: %d bytes, but %d pages need %d", f.Name(), ErrTruncated, size, sb.pageCount, need)
	}
	p.fileSize.Store(size)
	if err := survey.repair(); err != nil {
		return nil, err
	}
	p.noteSurvey(survey)
	if err := p.openSpace(opts.RebuildMap); err != nil {
		return nil, err
	}
	p.publishStats()
	return p, nil
}

// openSpace reads the allocation map. A damaged one is noted if it will be rebuilt.
func (p *Pager) openSpace(rebuild bool) error {
	allocation, live, err := p.readMap()
	switch {
	case err == nil:
		p.space, p.allocation = newSpace(live), allocation
	case rebuild && errors.Is(err, ErrCorrupt):
		p.mapDamage.Store(&err)
		p.space, p.allocation = newSpace(newLive()), &PageArray{kind: ArrayAllocationMap, size: p.pageSize}
	default:
		return err
	}
	return nil
}

// Close closes the file. A checkpoint must not be open.
func (p *Pager) Close() error {
	if !p.open.CompareAndSwap(false, true) {
		return ErrBusy
	}
	return p.file.Close()
}

// Err is the error that stopped the pager, or nil. It matches ErrFailed.
func (p *Pager) Err() error {
	if err := p.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// fail stops the pager permanently.
func (p *Pager) fail(cause error) error {
	if errors.Is(cause, ErrFailed) {
		return cause
	}
	err := fmt.Errorf("%w: %w", ErrFailed, cause)
	if errors.Is(cause, vfs.ErrNoSpace) { // space does not end it: the error must not match vfs.ErrNoSpace
		err = fmt.Errorf("%w: %v", ErrFailed, cause) //nolint:errorlint // see above
	}
	p.failure.CompareAndSwap(nil, &err)
	return err
}

// failed stops the pager, except after an error that leaves the contents of the device known: a full
// device before the superblock was written, or a cancelled context.
func (p *Pager) failed(err error) error {
	if errors.Is(err, ErrFailed) {
		return err
	}
	if errors.Is(err, vfs.ErrNoSpace) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return p.fail(err)
}

// ReuseAllFreed allows reuse of all pages that checkpoints up to n freed: no reader holds a root older
// than checkpoint n. It takes effect at the next Begin or Shrink.
func (p *Pager) ReuseAllFreed(n uint64) {
	for {
		old := p.reusableAll.Load()
		if n <= old || p.reusableAll.CompareAndSwap(old, n) {
			return
		}
	}
}

// ReuseFreed allows reuse of the pages that checkpoints up to n freed, except those that a pinned
// checkpoint still references. The pager keeps the slice. Each call replaces the previous one.
func (p *Pager) ReuseFreed(n uint64, pinned []uint64) { p.reusable.Store(&reuse{n, pinned}) }

// applyReuse frees the pages whose reuse is allowed. Only durable checkpoints have pending pages.
func (p *Pager) applyReuse() uint64 {
	n := p.reusableAll.Load()
	p.space.freePending(n, p.reusable.Load(), p.onFree)
	return n
}

// IsLive reports whether page id belongs to the newest durable state. No checkpoint may be open.
func (p *Pager) IsLive(id page.ID) bool { return p.space.live.Has(int(id)) }

package pager

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// maxPage bounds page ids: the row table has 39 bits for one. With the smallest pages that is a quarter of a petabyte.
const maxPage page.ID = 1<<39 - 1

// Options are what Create and Open are told.
type Options struct {
	// PageSize is the size of pages. Open takes zero for "whatever the file has".
	PageSize int
	// OnFree, if set, is called for every page that may be handed out again, before it is: a cache drops it. It is called
	// from Begin, Shrink and Abort.
	OnFree func(page.ID)
	// RebuildMap opens a file whose allocation map is damaged, too: see MapDamage and RebuildMap.
	RebuildMap bool
}

// Pager is an open data file.
type Pager struct {
	// Constant after Open.
	file     vfs.File
	pageSize int
	onFree   func(page.ID)
	damaged  error
	missing  bool            // the newest superblock may be lost: damaged says why
	repaired int             // superblocks that Open wrote anew
	faults   []*CorruptError // places of superblocks that Open found damaged

	// What everybody may read.
	base        atomic.Pointer[superblock]  // the newest durable state
	building    atomic.Uint64               // newest checkpoint number that a page in the file may carry
	reusableAll atomic.Uint64               // argument of the largest ReuseAllFreed
	reusable    atomic.Pointer[reuse]       // argument of the last ReuseFreed
	failure     atomic.Pointer[error]       // what stopped the pager
	fileSize    atomic.Int64                // bytes, written under growMu or by who holds open
	open        atomic.Bool                 // a checkpoint, or Shrink, is under way
	stats       atomic.Pointer[spaceCounts] // as of the last checkpoint's end
	reserve     atomic.Int64                // bytes of free pages that the file should hold
	counters    struct {
		reads, writes, submissions, damaged atomic.Uint64
	}

	mapDamage atomic.Pointer[error] // why the allocation map cannot be read; nil once it was rebuilt

	growMu sync.Mutex

	// Owned by the open checkpoint, or by who holds open.
	space      *space
	allocation *PageArray
	resynced   bool // the newest superblock is known to be on the device
}

// Create makes a data file with an empty state, which is checkpoint 1. An existing file is an error (fs.ErrExist).
// A process that dies within leaves nothing under the name.
func Create(fsys vfs.FS, name string, opts Options) (*Pager, error) {
	if !page.ValidSize(opts.PageSize) {
		return nil, fmt.Errorf("pager: page size %d is not a power of two between %d and %d", opts.PageSize, page.SizeMin, page.SizeMax)
	}
	if f, err := fsys.Open(name, vfs.ReadOnly); err == nil {
		return nil, errors.Join(fmt.Errorf("pager: creating %s: %w", name, fs.ErrExist), f.Close())
	}
	if err := writeEmpty(fsys, name, opts.PageSize); err != nil {
		return nil, fmt.Errorf("pager: creating %s: %w", name, err)
	}
	return Open(fsys, name, opts)
}

// writeEmpty builds the file under another name and renames it, so that the name stands for a whole file or for none.
func writeEmpty(fsys vfs.FS, name string, pageSize int) error {
	building := name + ".new"
	if err := fsys.Remove(building); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := fsys.Open(building, vfs.Create)
	if err != nil {
		return err
	}
	sb := superblock{version: formatVersion, pageSize: pageSize, pageCount: superblocks}
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
	return fsys.SyncDir(path.Dir(name))
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
	survey, err := surveySuperblocks(f)
	if err != nil {
		return nil, err
	}
	sb := survey.newest
	if opts.PageSize != 0 && opts.PageSize != sb.pageSize {
		return nil, fmt.Errorf("%s: %w: %d, not %d", f.Name(), ErrPageSize, sb.pageSize, opts.PageSize)
	}
	p := &Pager{file: f, pageSize: sb.pageSize, onFree: opts.OnFree, space: newSpace()}
	if p.onFree == nil {
		p.onFree = func(page.ID) {}
	}
	p.base.Store(&sb)
	p.reusable.Store(new(reuse))
	p.building.Store(sb.checkpoint)
	size, err := f.Size()
	if err != nil {
		return nil, err
	}
	if need := p.offset(sb.pageCount); size < need {
		return nil, fmt.Errorf("%s: %w: %d bytes, %d pages need %d", f.Name(), ErrTruncated, size, sb.pageCount, need)
	}
	p.fileSize.Store(size)
	if err := survey.repair(); err != nil {
		return nil, err
	}
	p.noteSurvey(survey)
	if err := p.readMap(&sb); err != nil {
		if !opts.RebuildMap || !errors.Is(err, ErrCorrupt) {
			return nil, err
		}
		p.mapDamage.Store(&err)
		p.space, p.allocation = newSpace(), &PageArray{kind: ArrayAllocationMap, size: p.pageSize}
	}
	p.publishStats()
	return p, nil
}

// noteSurvey notes what was found at the places of superblocks.
func (p *Pager) noteSurvey(s *superblockSurvey) {
	p.damaged, p.missing = s.damage(), !s.certain
	if s.certain {
		p.repaired = len(s.faults)
	}
	for _, f := range s.faults {
		p.faults = append(p.faults, &CorruptError{File: p.file.Name(), Page: f.at, Offset: p.offset(f.at), Reason: "superblock: " + f.err.Error()})
	}
}

// mapLeaves is the number of leaves of an allocation map for so many pages. A file without pages needs none.
func (p *Pager) mapLeaves(pages page.ID) int {
	if pages <= superblocks {
		return 0
	}
	perLeaf := ArrayLeafBytes(p.pageSize) * 8
	return (int(pages) + perLeaf - 1) / perLeaf
}

// pageCountFor is the page count of a state whose map has so many leaves. Moving the map's own pages down may leave the last live
// page in front of what its last leaf is about; the count then says that the leaf is there all the same, for that is how the
// map is found again.
func (p *Pager) pageCountFor(leaves int) page.ID {
	count := p.space.liveEnd()
	if p.mapLeaves(count) < leaves {
		count = page.ID((leaves-1)*ArrayLeafBytes(p.pageSize)*8 + 1)
	}
	return count
}

// encodeMapLeaf fills leaf i of the allocation map: one bit for each page, in words of 64.
func (p *Pager) encodeMapLeaf(i int, payload []byte) {
	words := len(payload) / 8
	for w := range words {
		binary.LittleEndian.PutUint64(payload[w*8:], p.space.live.Word(i*words+w))
	}
}

func (p *Pager) readMap(sb *superblock) error {
	if sb.pageCount > maxPage {
		return p.corrupt(sb.slot(), fmt.Sprintf("%d pages", sb.pageCount))
	}
	var err error
	p.allocation, err = p.readArray(ArrayAllocationMap, sb.allocation, p.mapLeaves(sb.pageCount), func(i int, payload []byte) error {
		words := len(payload) / 8
		for w := range words {
			p.space.setLiveWord(i*words+w, binary.LittleEndian.Uint64(payload[w*8:]))
		}
		return nil
	})
	if err != nil {
		return err
	}
	if end := p.pageCountFor(p.allocation.leaves()); end != sb.pageCount {
		return p.corrupt(sb.allocation.Page, fmt.Sprintf("the map ends at page %d, the superblock says %d", end, sb.pageCount))
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

func (p *Pager) current() *superblock { return p.base.Load() }

// PageSize is the size of the file's pages.
func (p *Pager) PageSize() int { return p.pageSize }

// State is the newest durable state.
func (p *Pager) State() State { return p.current().state }

// Blobs is the row store's part of the newest durable state.
func (p *Pager) Blobs() BlobState { return p.current().blobs }

// Checkpoint is the number of the newest durable state.
func (p *Pager) Checkpoint() uint64 { return p.current().checkpoint }

// StoreID is the random identity that the file was given when it was created.
func (p *Pager) StoreID() [16]byte { return p.current().storeID }

// SuperblockDamage says which superblocks, or copies of superblocks, Open found damaged; nil if all were intact.
func (p *Pager) SuperblockDamage() error { return p.damaged }

// SuperblockFaults are the same places, one by one.
func (p *Pager) SuperblockFaults() []*CorruptError { return p.faults }

// SuperblocksRepaired is how many of them Open wrote anew.
func (p *Pager) SuperblocksRepaired() int { return p.repaired }

// SuperblockMissing reports whether the superblock of a checkpoint newer than the open one may be lost, with its copy. Everything that the open
// state reaches is in place then, but the log must reach back to its epoch: if it does not, the newer state was durable.
func (p *Pager) SuperblockMissing() bool { return p.missing }

// ReadArray reads a vector of the newest durable state, with so many leaves; leaf gets the bytes of each, in order.
func (p *Pager) ReadArray(kind ArrayKind, root ArrayRoot, leaves int, leaf func(i int, payload []byte) error) (*PageArray, error) {
	return p.readArray(kind, root, leaves, leaf)
}

// Err is what stopped the pager, or nil. It matches ErrFailed.
func (p *Pager) Err() error {
	if err := p.failure.Load(); err != nil {
		return *err
	}
	return nil
}

// fail stops the pager for good.
func (p *Pager) fail(cause error) error {
	if errors.Is(cause, ErrFailed) {
		return cause
	}
	err := fmt.Errorf("%w: %w", ErrFailed, cause)
	p.failure.CompareAndSwap(nil, &err)
	return err
}

// failed stops the pager unless the error is one that leaves the device's contents known: a full device before the superblock
// was touched, or a caller that changed its mind.
func (p *Pager) failed(err error) error {
	if errors.Is(err, ErrFailed) {
		return err
	}
	if errors.Is(err, vfs.ErrNoSpace) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return p.fail(err)
}

// ReuseAllFreed says that no reader is left that holds a root older than checkpoint n, so that what checkpoints through n freed may be
// used again. It takes effect with the next Begin or Shrink.
func (p *Pager) ReuseAllFreed(n uint64) {
	for {
		old := p.reusableAll.Load()
		if n <= old || p.reusableAll.CompareAndSwap(old, n) {
			return
		}
	}
}

// ReuseFreed says the same but for who looks at the frozen states of some checkpoints, which may be older: what checkpoints through n freed, and none
// of these states reaches, may be used again. The slice is the pager's from then on. Of several calls the last one counts.
func (p *Pager) ReuseFreed(n uint64, frozen []uint64) { p.reusable.Store(&reuse{n, frozen}) }

// applyReuse frees what may be freed. Only durable checkpoints have pending pages.
func (p *Pager) applyReuse() uint64 {
	n := p.reusableAll.Load()
	p.space.freePending(n, p.reusable.Load(), p.onFree)
	return n
}

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

// maxPage bounds page ids: a location in the indirection table has 39 bits for one. With the smallest
// pages that is a quarter of a petabyte.
const maxPage page.ID = 1<<39 - 1

// Options are the parameters of Create and Open.
type Options struct {
	// PageSize is the size of pages. With zero, Open takes the page size of the file.
	PageSize int
	// OnFree, if set, is called for every page before it can be taken again, so that a cache can invalidate
	// it. It is called from Begin, Shrink and Abort.
	OnFree func(page.ID)
	// RebuildMap lets Open succeed although the allocation map is damaged: see MapDamage and RebuildMap.
	RebuildMap bool
}

// superblockFindings is what was found wrong with superblocks when the file was opened.
type superblockFindings struct {
	damaged  error
	missing  bool            // the newest superblock may be missing: damaged says why
	repaired int             // superblocks that Open wrote again
	faults   []*CorruptError // damaged pages of superblocks that Open found
}

// Pager is an open data file.
type Pager struct {
	// Constant after Open.
	file     vfs.File
	pageSize int
	onFree   func(page.ID)
	superblockFindings

	// Readable at any time.
	base        atomic.Pointer[superblock]  // the newest durable state
	building    atomic.Uint64               // newest checkpoint number that a page in the file may carry
	reusableAll atomic.Uint64               // argument of the largest ReuseAllFreed
	reusable    atomic.Pointer[reuse]       // argument of the last ReuseFreed
	failure     atomic.Pointer[error]       // what stopped the pager
	fileSize    atomic.Int64                // bytes; written under growMu or by the goroutine that has set open
	open        atomic.Bool                 // a checkpoint or Shrink is running
	stats       atomic.Pointer[spaceCounts] // as of the end of the last checkpoint
	reserve     atomic.Int64                // bytes of free pages that the file should hold
	counters    struct {
		reads, writes, submissions, damaged atomic.Uint64
	}

	mapDamage atomic.Pointer[error] // why the allocation map cannot be read; nil after RebuildMap

	growMu sync.Mutex

	// Owned by the open checkpoint, or by the goroutine that has set open.
	space      *space
	allocation *PageArray
	resynced   bool // the newest superblock is certainly on the device
}

// Create makes a data file with an empty state, which is checkpoint 1. An existing file is an error
// (fs.ErrExist). If the process dies during Create, no file has the name.
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

// writeEmpty builds the file under another name and renames it, so that the name means a whole file or
// none.
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
		return nil, fmt.Errorf("%s: %w: %d, expected %d", f.Name(), ErrPageSize, sb.pageSize, opts.PageSize)
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
		return nil, fmt.Errorf("%s: %w: %d bytes, but %d pages need %d", f.Name(), ErrTruncated, size, sb.pageCount, need)
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

// noteSurvey records the damage that was found on the pages of superblocks.
func (p *Pager) noteSurvey(s *superblockSurvey) {
	p.damaged, p.missing = s.damage(), !s.certain
	if s.certain {
		p.repaired = len(s.faults)
	}
	for _, f := range s.faults {
		p.faults = append(p.faults, &CorruptError{File: p.file.Name(), Page: f.at, Offset: p.offset(f.at), Reason: "superblock: " + f.err.Error()})
	}
}

// mapLeaves is the number of leaves of an allocation map for this many pages. A file without pages needs
// none.
func (p *Pager) mapLeaves(pages page.ID) int {
	if pages <= superblocks {
		return 0
	}
	perLeaf := ArrayLeafBytes(p.pageSize) * 8
	return (int(pages) + perLeaf - 1) / perLeaf
}

// pageCountFor is the page count of a state whose map has this many leaves. If the map's own pages moved
// down, the last live page may be before the range of the map's last leaf. The count then includes that
// leaf's range, because Open computes the number of leaves from the count.
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
		return p.corrupt(sb.slot(), fmt.Sprintf("impossible page count %d", sb.pageCount))
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

// Blobs is the blob store's part of the newest durable state.
func (p *Pager) Blobs() BlobState { return p.current().blobs }

// Checkpoint is the number of the newest durable state.
func (p *Pager) Checkpoint() uint64 { return p.current().checkpoint }

// StoreID is the random identity that Create gave the file.
func (p *Pager) StoreID() [16]byte { return p.current().storeID }

// SuperblockDamage says which superblocks and copies of superblocks Open found damaged; nil if all were
// intact.
func (p *Pager) SuperblockDamage() error { return p.damaged }

// SuperblockFaults are the same pages, one by one.
func (p *Pager) SuperblockFaults() []*CorruptError { return p.faults }

// SuperblocksRepaired is how many of them Open wrote again.
func (p *Pager) SuperblocksRepaired() int { return p.repaired }

// SuperblockMissing reports whether the superblock of a newer checkpoint may be missing, together with
// its copy. All pages of the open state are intact then, but the log must reach back to its epoch. If it
// does not, the newer state was durable.
func (p *Pager) SuperblockMissing() bool { return p.missing }

// ReadArray reads a page array of the newest durable state. It calls leaf with the bytes of each leaf,
// in order.
func (p *Pager) ReadArray(kind ArrayKind, root ArrayRoot, leaves int, leaf func(i int, payload []byte) error) (*PageArray, error) {
	return p.readArray(kind, root, leaves, leaf)
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

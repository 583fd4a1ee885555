package pager

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// ErrCorrupt matches every CorruptError.
var ErrCorrupt = errors.New("pager: page corruption")

// CorruptError is a damaged page. It is reported and never served.
type CorruptError struct {
	File   string
	Page   page.ID
	Offset int64
	Reason string
}

func (e *CorruptError) Error() string {
	return fmt.Sprintf("pager: %s: page %d at offset %d is damaged: %s", e.File, e.Page, e.Offset, e.Reason)
}

// Is makes errors.Is(err, ErrCorrupt) true.
func (e *CorruptError) Is(target error) bool { return target == ErrCorrupt }

// Reader reads the newest durable state of a data file. It is the part that a Pager, whose state changes
// with each checkpoint, and a Snapshot, whose state never changes, have in common. It writes nothing, and
// takes no lock.
type Reader struct {
	// Constant after Open.
	file     vfs.File
	pageSize int
	superblockFindings

	newest   atomic.Pointer[superblock] // the newest durable state
	building atomic.Uint64              // newest checkpoint number that a page in the file may carry

	reads, damaged atomic.Uint64 // pages that were read; pages that a read refused
	unreadable     atomic.Uint64 // reads that the device failed, after the last attempt

	again atomic.Pointer[func(failed int) bool] // see ReadAgain
}

// superblockFindings is what was found wrong with superblocks when the file was opened.
type superblockFindings struct {
	surveyed error           // which superblocks and copies were damaged; nil if all were intact
	missing  bool            // the newest superblock may be missing: surveyed says why
	repaired int             // superblocks that Open wrote again
	faults   []*CorruptError // damaged pages of superblocks that Open found
}

// noteSurvey records the damage that was found on the pages of superblocks.
func (r *Reader) noteSurvey(s *superblockSurvey) {
	r.surveyed, r.missing = s.damage(), !s.certain
	if s.certain {
		r.repaired = len(s.faults)
	}
	for _, f := range s.faults {
		r.faults = append(r.faults, &CorruptError{File: r.file.Name(), Page: f.at, Offset: r.offset(f.at), Reason: "superblock: " + f.err.Error()})
	}
}

// Name is the data file's name.
func (r *Reader) Name() string { return r.file.Name() }

// DropCache makes later reads find what is on the device, whatever became of syncs of earlier processes: see vfs.File.
func (r *Reader) DropCache() { r.file.DropCache() }

func (r *Reader) current() *superblock { return r.newest.Load() }

// PageSize is the size of the file's pages.
func (r *Reader) PageSize() int { return r.pageSize }

// State is the newest durable state.
func (r *Reader) State() State { return r.current().state }

// Blobs is the blob store's part of the newest durable state.
func (r *Reader) Blobs() BlobState { return r.current().blobs }

// PageCount is the number of pages up to the last live one.
func (r *Reader) PageCount() page.ID { return r.current().pageCount }

// MapRoot is the root of the allocation map.
func (r *Reader) MapRoot() page.ID { return r.current().allocation.Page }

// OfSuperblock reports whether a page is of a superblock, or of its copy or the next one's.
func (r *Reader) OfSuperblock(id page.ID) bool {
	sb := r.current()
	return id < superblocks || id == sb.copy || id == sb.nextCopy
}

// Unreadable is the number of reads that the device failed, the last attempt included. The pages may be intact.
func (r *Reader) Unreadable() uint64 { return r.unreadable.Load() }

// ReadAgain sets the function that decides, after the device has failed a number of reads of a page, whether the page is read once more; nil for
// never. The goroutine that reads the page calls it, and it may wait.
func (r *Reader) ReadAgain(again func(failed int) bool) {
	if again == nil {
		r.again.Store(nil)
		return
	}
	r.again.Store(&again)
}

// PagesRead is the number of pages that were read so far.
func (r *Reader) PagesRead() uint64 { return r.reads.Load() }

// Checkpoint is the number of the newest durable state.
func (r *Reader) Checkpoint() uint64 { return r.current().checkpoint }

// StoreID is the random identity that Create gave the file.
func (r *Reader) StoreID() [16]byte { return r.current().storeID }

// SuperblockDamage says which superblocks and copies of superblocks Open found damaged; nil if all were
// intact.
func (r *Reader) SuperblockDamage() error { return r.surveyed }

// SuperblockFaults are the same pages, one by one.
func (r *Reader) SuperblockFaults() []*CorruptError { return r.faults }

// SuperblocksRepaired is how many of them Open wrote again.
func (r *Reader) SuperblocksRepaired() int { return r.repaired }

// SuperblockMissing reports whether the superblock of a newer checkpoint may be missing, together with
// its copy. All pages of the open state are intact then, but the log must reach back to its epoch. If it
// does not, the newer state was durable.
func (r *Reader) SuperblockMissing() bool { return r.missing }

// Corrupt returns the error for a page whose contents its reader cannot interpret, and counts it.
func (r *Reader) Corrupt(id page.ID, reason string) error { return r.corrupt(id, reason) }

func (r *Reader) corrupt(id page.ID, reason string) error {
	r.damaged.Add(1)
	return &CorruptError{File: r.file.Name(), Page: id, Offset: r.offset(id), Reason: reason}
}

func (r *Reader) offset(id page.ID) int64 { return int64(id) * int64(r.pageSize) }

// readWindow bounds the memory of the pager's own reads, in pages.
const readWindow = 64

// ReadPage reads page id into buf, which must have the page size. It checks that buf then holds that
// page, whole, and that no later state than the open one wrote it. It takes no lock.
func (r *Reader) ReadPage(id page.ID, buf []byte) error {
	if id < superblocks || id > maxPage {
		return r.corrupt(id, "no page has this id")
	}
	r.reads.Add(1)
	n, err := r.file.ReadAt(buf[:r.pageSize], r.offset(id))
	if err != nil {
		err = r.retry(id, buf, n, err)
	}
	if err != nil {
		return err
	}
	return r.check(id, buf)
}

// retry reads page id again as long as the device fails and ReadAgain allows it. n and err are the result of the first read.
func (r *Reader) retry(id page.ID, buf []byte, n int, err error) error {
	if again := r.again.Load(); again != nil {
		if n, err = (patientFile{r.file, *again}).retry(buf[:r.pageSize], r.offset(id), n, err); err == nil {
			return nil
		}
	}
	return r.readFailed(id, n, err)
}

// Read is one page of a batch.
type Read struct {
	ID  page.ID
	Buf []byte
	Err error
}

// ReadPages reads a batch of pages in one submission. It sets the Err of each read, and returns the first
// of them. If one of the ids is impossible, it reads nothing.
func (r *Reader) ReadPages(reads []Read) error {
	reqs := make([]vfs.Request, len(reads))
	for i := range reads {
		if reads[i].ID < superblocks || reads[i].ID > maxPage {
			err := r.corrupt(reads[i].ID, "no page has this id")
			for j := range reads {
				reads[j].Err = err
			}
			return err
		}
		reqs[i] = vfs.Request{Buf: reads[i].Buf[:r.pageSize], Offset: r.offset(reads[i].ID)}
	}
	r.reads.Add(uint64(len(reads)))
	_ = r.file.ReadBatch(reqs) // each request has its own error
	var first error
	for i := range reads {
		if reads[i].Err = reqs[i].Err; reads[i].Err != nil {
			reads[i].Err = r.retry(reads[i].ID, reads[i].Buf, 0, reads[i].Err)
		}
		if reads[i].Err == nil {
			reads[i].Err = r.check(reads[i].ID, reads[i].Buf)
		}
		if first == nil {
			first = reads[i].Err
		}
	}
	return first
}

// readFailed returns damage if the device has lost the page, or if the page is past the end of the file.
// It returns other failures as they are.
func (r *Reader) readFailed(id page.ID, n int, err error) error {
	if size, e := r.file.Size(); e == nil && size < r.offset(id+1) {
		return r.corrupt(id, fmt.Sprintf("the file ends at %d", size))
	}
	if errors.Is(err, vfs.ErrDevice) {
		r.unreadable.Add(1)
		return r.corrupt(id, fmt.Sprintf("the device cannot read it: %v", err))
	}
	return fmt.Errorf("pager: reading page %d (%d bytes read): %w", id, n, err)
}

func (r *Reader) check(id page.ID, buf []byte) error {
	if err := page.Check(buf[:r.pageSize], id); err != nil {
		return r.corrupt(id, err.Error())
	}
	if c, newest := page.ReadHeader(buf).Checkpoint, r.building.Load(); c > newest {
		return r.corrupt(id, fmt.Sprintf("checkpoint %d wrote it, and the newest is %d", c, newest))
	}
	return nil
}

// IsFree reports whether a page that cannot be read is certainly none of the newest durable state: it was never written, or has lost its blocks since
// it was freed, or a later checkpoint has written it, which a crash ended.
func (r *Reader) IsFree(id page.ID, buf []byte) bool {
	buf = buf[:r.pageSize]
	if _, err := r.file.ReadAt(buf, r.offset(id)); err != nil {
		return false
	}
	if page.Check(buf, id) == nil {
		return page.ReadHeader(buf).Checkpoint > r.building.Load()
	}
	return !slices.ContainsFunc(buf, func(b byte) bool { return b != 0 })
}

// readEach reads pages in windows, and calls each with every page, in order. buf is valid until each
// returns.
func (r *Reader) readEach(ids []page.ID, each func(i int, buf []byte) error) error {
	window := min(len(ids), readWindow)
	slab := vfs.AlignedBuffer(window * r.pageSize)
	reads := make([]Read, window)
	for start := 0; start < len(ids); start += window {
		n := min(window, len(ids)-start)
		for i := range n {
			reads[i] = Read{ID: ids[start+i], Buf: slab[i*r.pageSize : (i+1)*r.pageSize]}
		}
		if err := r.ReadPages(reads[:n]); err != nil {
			return err
		}
		for i := range n {
			if err := each(start+i, reads[i].Buf); err != nil {
				return err
			}
		}
	}
	return nil
}

package wal

import (
	"errors"
	"fmt"
	iofs "io/fs"
	"math"
	"path"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Old files are kept to become new segments. A checkpoint frees several at once, and rotations take one at a time, so as many are
// kept as the last truncation freed: until the next one, the log will need about as many again. More files would only hold disk space.
const (
	recyclableMin = 2
	recyclableMax = 12 // what a checkpoint frees while writers wait for merges
)

// preallocator keeps segments ready, so that a rotation neither creates a file nor touches a page, and does
// not wait while a slow device delays the preparation of the next segment. It keeps one segment ready until
// a writer has found none: a log with few writes takes no memory and no blocks for more. It recycles old
// files where possible: their blocks are allocated and written, which makes overwriting them cheap, and
// recycling costs a rename instead of writing zeros.
//
// Of a recycled file only the header is cleared; its old records do not match its new identity.
//
// Invariants: no file here holds a needed record, so no failure of an operation on one is final, and every
// file is used again or removed in the end; a segment is either in ready, or assigned, or taken.
type preallocator struct {
	fs      vfs.FS
	dir     string
	buffers *bufferPool
	names   *names

	number uint64 // last segment number used; owned by the goroutine that prepares

	mu         sync.Mutex      // never held during an operation of the file system
	ready      []*preallocated // prepared, by number; the first may be oversized, made for a writer that waited
	assigned   *preallocated   // to the rotation that comes next: the preparing goroutine does not touch it
	target     int             // how many are to be ready; at most buffers.max - 2, so that one can be filled and one flushed
	turns      turns           // of oversized segments
	recyclable []string        // recyclable files of standard size, none of which a replay takes for a segment
	recycling  int             // files that are being added to them
	mayRecycle int             // how many of them are kept
	toRemove   []string        // files to be removed

	reserve reserve

	zeros [headerPage]byte // constant
}

// preallocated is a prepared segment: a durable name, allocated blocks, a buffer of zeros.
type preallocated struct {
	file   vfs.File
	path   string
	number uint64
	buffer []byte
	pooled bool
}

// firstBytesLocked is the size of the segment that the next rotation gets, or zero if none is ready.
func (p *preallocator) firstBytesLocked() int {
	switch {
	case p.assigned != nil:
		return len(p.assigned.buffer)
	case len(p.ready) > 0:
		return len(p.ready[0].buffer)
	}
	return 0
}

// assignFirstLocked assigns the next segment to the rotation that is about to come, if the segment has at
// least size bytes.
func (p *preallocator) assignFirstLocked(size int) bool {
	if p.assigned != nil {
		p.ready = slices.Insert(p.ready, 0, p.assigned)
		p.assigned = nil
	}
	if !p.firstFitsLocked(size) || p.turns.keeps(len(p.ready[0].buffer), size) {
		return false
	}
	p.assigned = p.ready[0]
	p.ready = slices.Delete(p.ready, 0, 1)
	return true
}

// firstFitsLocked reports whether the first of the segments that are ready has at least size bytes.
func (p *preallocator) firstFitsLocked(size int) bool {
	return len(p.ready) > 0 && len(p.ready[0].buffer) >= size
}

// anyReady reports whether a segment is ready.
func (p *preallocator) anyReady() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.firstFitsLocked(0)
}

// takeAssigned returns the assigned segment, or nil.
func (p *preallocator) takeAssigned() (b *preallocated) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if b, p.assigned = p.assigned, nil; b != nil {
		p.turns.taken(len(b.buffer))
	}
	return b
}

// requestMoreLocked raises the number of segments that are kept ready, because a writer has found none, and
// reports whether that is the first time.
func (p *preallocator) requestMoreLocked() (first bool) {
	first = p.target == 0
	p.target = min(max(1, 2*p.target), p.buffers.max-2)
	return first
}

// prepare makes one segment, unless all buffers are in use, and reports whether it did.
func (p *preallocator) prepare(allocate func(f vfs.File, size int64) error) (made bool, err error) {
	b, err := p.make(allocate)
	if b == nil {
		return false, err
	}
	p.add(b)
	return true, nil
}

func (p *preallocator) add(b *preallocated) {
	p.mu.Lock()
	p.ready = append(p.ready, b)
	p.mu.Unlock()
}

// make makes a segment of standard size, or returns nil if all buffers are in use.
func (p *preallocator) make(allocate func(f vfs.File, size int64) error) (*preallocated, error) {
	buffer, err := p.buffers.take()
	if buffer == nil || err != nil {
		return nil, err
	}
	b, err := p.file(p.buffers.size, allocate)
	if err != nil {
		p.buffers.put(buffer, 0)
		return nil, err
	}
	b.buffer, b.pooled = buffer, true
	return b, nil
}

// oversized makes a segment of its own size for one large record. The segments that are ready then have lower
// numbers and must not be used after it: their files are recycled under higher numbers.
func (p *preallocator) oversized(size int) error {
	buffer, err := p.buffers.mapZero(size)
	if err != nil {
		return err
	}
	b, err := p.create(size, vfs.Preallocate)
	if err != nil {
		return errors.Join(err, p.buffers.unmap(buffer))
	}
	b.buffer = buffer
	err = p.discard()
	p.add(b)
	return err
}

// discard recycles the segments that are ready: their numbers are too low after an oversized segment.
func (p *preallocator) discard() error {
	p.mu.Lock()
	ready := p.ready
	p.ready = nil
	p.mu.Unlock()
	var errs []error
	for _, b := range ready {
		errs = append(errs, b.file.Close())
		p.recycle(b.path, int64(len(b.buffer)))
		if b.pooled {
			p.buffers.put(b.buffer, 0)
		} else {
			errs = append(errs, p.buffers.unmap(b.buffer))
		}
	}
	return errors.Join(errs...)
}

// file makes a file of standard size, from an old file if one is usable.
func (p *preallocator) file(size int, allocate func(f vfs.File, size int64) error) (*preallocated, error) {
	if from := p.takeRecyclable(); from != "" {
		b, err := p.reuse(from, size)
		if b != nil || err != nil {
			return b, err
		}
	}
	return p.create(size, allocate)
}

// reuse makes a new file from an old one. It returns nil if the old file is too short, as a crash may have
// left it: some of its blocks are missing. The old header is cleared before the file gets its new name: with
// a damaged header, a replay could not tell that the file holds no records. After an error the file is kept
// for another attempt, under the name that it has then.
func (p *preallocator) reuse(from string, size int) (*preallocated, error) {
	f, err := p.fs.Open(from, vfs.ReadWrite)
	if err != nil {
		if vfs.Exhausted(err) {
			p.addRecyclable(from)
		} else {
			p.scheduleRemoval(from)
		}
		return nil, fmt.Errorf("wal: recycle a segment: %w", err)
	}
	actual, err := f.Size()
	if err == nil && actual != int64(size) {
		p.scheduleRemoval(from)
		return nil, f.Close()
	}
	if err == nil {
		_, err = f.WriteAt(p.zeros[:], 0)
	}
	if err == nil {
		err = f.SyncData()
	}
	b, name, keep, named := p.next(), from, p.addRecyclable, p.names.begin()
	if err == nil {
		if err = p.fs.Rename(from, b.path); err == nil {
			name = b.path
			err = p.names.sync(named)
		}
	} else if !errors.Is(err, vfs.ErrNoSpace) {
		keep = p.scheduleRemoval // a new file may get blocks without damage
	}
	if err != nil {
		keep(name)
		return nil, errors.Join(fmt.Errorf("wal: recycle a segment: %w", err), f.Close())
	}
	b.file = f
	return b, nil
}

// takeRecyclable takes a recyclable file, or returns "".
func (p *preallocator) takeRecyclable() (name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.recyclable); n > 0 {
		name = p.recyclable[n-1]
		p.recyclable = p.recyclable[:n-1]
	}
	return name
}

// addRecyclable takes a recyclable file back.
func (p *preallocator) addRecyclable(name string) {
	p.mu.Lock()
	p.recyclable = append(p.recyclable, name)
	p.mu.Unlock()
}

// create makes a new file. After an error it removes the incomplete file.
func (p *preallocator) create(size int, allocate func(f vfs.File, size int64) error) (*preallocated, error) {
	b, named := p.next(), p.names.begin()
	f, err := p.fs.Open(b.path, vfs.Create)
	if err != nil {
		return nil, fmt.Errorf("wal: create a segment: %w", err)
	}
	err = allocate(f, int64(size))
	if err == nil {
		err = f.Sync() // its size, on which later syncs of data rely
	}
	if err == nil {
		err = p.names.sync(named)
	}
	if err != nil {
		p.scheduleRemoval(b.path)
		return nil, errors.Join(fmt.Errorf("wal: create a segment: %w", err), f.Close(), p.removeScheduled())
	}
	b.file = f
	return b, nil
}

// scheduleRemoval schedules the removal of a file.
func (p *preallocator) scheduleRemoval(name string) {
	p.mu.Lock()
	p.toRemove = append(p.toRemove, name)
	p.mu.Unlock()
}

// removeScheduled removes the files that are not needed. It schedules the removal again if it fails.
func (p *preallocator) removeScheduled() error {
	p.mu.Lock()
	names := p.toRemove
	p.toRemove = nil
	p.mu.Unlock()
	var errs []error
	for _, name := range names {
		if err := p.fs.Remove(name); err != nil && !errors.Is(err, iofs.ErrNotExist) {
			p.scheduleRemoval(name)
			errs = append(errs, fmt.Errorf("wal: remove an old segment: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (p *preallocator) next() *preallocated {
	p.number++
	return &preallocated{number: p.number, path: path.Join(p.dir, FileName(p.number))}
}

// truncated says how many segments a truncation frees. If they are fewer than before, half of the files for more are kept:
// truncations of one segment come between those of many.
func (p *preallocator) truncated(segments int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mayRecycle = min(max(segments, p.mayRecycle/2, recyclableMin), recyclableMax)
	p.keepRecyclableLocked(p.mayRecycle)
}

// keepRecyclableLocked schedules the removal of all old files but so many, and reports whether there were more.
func (p *preallocator) keepRecyclableLocked(most int) (fewer bool) {
	extra := max(len(p.recyclable)-most, 0)
	p.toRemove = append(p.toRemove, p.recyclable[:extra]...)
	p.recyclable = slices.Delete(p.recyclable, 0, extra)
	return extra > 0
}

// releaseOld removes the old files that are kept to become segments, but for a few, and reports whether there were any.
func (p *preallocator) releaseOld(most int) (released bool, err error) {
	p.mu.Lock()
	released = p.keepRecyclableLocked(most)
	p.mu.Unlock()
	return released, p.removeScheduled()
}

// recycle keeps a file without records to become a new segment, or schedules its removal.
func (p *preallocator) recycle(name string, size int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mayRecycleLocked(name, size) {
		p.recyclable = append(p.recyclable, name)
	}
}

// recycleSegment is recycle for a segment that is not needed any more. A file that is kept loses the name of a segment:
// otherwise the next start would find a part of the old segments, with holes where others have become new ones, and its
// readers of the log would take the holes for damage. The rename needs no directory sync: an old segment that comes back
// after a crash is older than the epoch from which replay starts.
func (p *preallocator) recycleSegment(old string, size int64) (kept bool) {
	p.mu.Lock()
	if !p.mayRecycleLocked(old, size) {
		p.mu.Unlock()
		return false
	}
	p.recycling++
	name := p.newReserveNameLocked()
	p.mu.Unlock()
	kept = p.fs.Rename(old, name) == nil
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recycling--
	if kept {
		p.recyclable = append(p.recyclable, name)
	} else {
		p.toRemove = append(p.toRemove, old)
	}
	return kept
}

// mayRecycleLocked reports whether an old file is to be kept. If not, it schedules the removal of the file.
func (p *preallocator) mayRecycleLocked(name string, size int64) bool {
	if invariants.Enabled {
		p.assertOneUseLocked(name)
	}
	if size == int64(p.buffers.size) && len(p.recyclable)+p.recycling < max(p.mayRecycle, recyclableMin) {
		return true
	}
	p.toRemove = append(p.toRemove, name)
	return false
}

func (p *preallocator) close() error {
	p.mu.Lock()
	p.assignFirstLocked(math.MaxInt) // assigns none, and returns the assigned one
	p.mu.Unlock()
	return errors.Join(p.discard(), p.removeScheduled())
}

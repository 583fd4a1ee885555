package wal

import (
	"errors"
	"fmt"
	iofs "io/fs"
	"math"
	"path"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/vfs"
)

// recyclableMax bounds the old files kept for use as new ones: a checkpoint frees a few at once, rotation takes one at
// a time. More would hold disk space for nothing.
const recyclableMax = 2

// spares keeps segments prepared, so that a rotation neither creates a file nor touches a page, and goes on while a slow device
// holds up the preparation of the next. There is one until that was too few for somebody: a log that is seldom written to takes no memory and no blocks for
// more. Old files are used
// again where possible: their blocks are allocated and written, which is what makes overwriting them cheap, and
// recycling costs a rename instead of writing zeros.
//
// Of a recycled file only the header is wiped; its old records do not match its new identity.
//
// No file here holds a record that is needed. Nothing that goes wrong with one is final, and none is forgotten.
type spares struct {
	fs     vfs.FS
	dir    string
	images *images

	number uint64 // last segment number used; owned by the goroutine that prepares

	mu     sync.Mutex // never held during an operation of the file system
	ready  []*blank   // prepared, by number; the first may be oversized, made for a writer that waited
	held   *blank     // set aside for a rotation: the preparing goroutine leaves it alone
	want   int        // how many are to be ready; at most images.max - 2, so that one can be filled and one flushed
	old    []string   // recyclable files of standard size
	doomed []string   // files to be removed

	reserve reserve

	zeros [headerPage]byte // constant
}

// blank is a prepared segment: a durable name, allocated blocks, a zero image.
type blank struct {
	file   vfs.File
	path   string
	number uint64
	image  []byte
	pooled bool
}

// holdLocked sets the next segment aside for a rotation that is about to come, if it has at least size bytes.
func (p *spares) holdLocked(size int) bool {
	if p.held != nil {
		p.ready = slices.Insert(p.ready, 0, p.held)
		p.held = nil
	}
	if len(p.ready) == 0 || len(p.ready[0].image) < size {
		return false
	}
	p.held = p.ready[0]
	p.ready = slices.Delete(p.ready, 0, 1)
	return true
}

// takeHeld returns what was set aside, or nil.
func (p *spares) takeHeld() (b *blank) {
	p.mu.Lock()
	defer p.mu.Unlock()
	b, p.held = p.held, nil
	return b
}

// wantMoreLocked raises the number of spares, because a writer has found none, and reports whether that is the first time.
func (p *spares) wantMoreLocked() (first bool) {
	first = p.want == 0
	p.want = min(max(1, 2*p.want), p.images.max-2)
	return first
}

// prepare makes one spare, unless all images are in use, and reports whether it did.
func (p *spares) prepare(allocate func(f vfs.File, size int64) error) (made bool, err error) {
	b, err := p.make(allocate)
	if b == nil {
		return false, err
	}
	p.add(b)
	return true, nil
}

func (p *spares) add(b *blank) {
	p.mu.Lock()
	p.ready = append(p.ready, b)
	p.mu.Unlock()
}

// make makes a blank of standard size, or returns nil if all images are in use.
func (p *spares) make(allocate func(f vfs.File, size int64) error) (*blank, error) {
	image, err := p.images.take()
	if image == nil || err != nil {
		return nil, err
	}
	b, err := p.file(p.images.size, allocate)
	if err != nil {
		p.images.give(image, 0)
		return nil, err
	}
	b.image, b.pooled = image, true
	return b, nil
}

// oversized makes a segment of its own size for one large record. The spares, whose numbers are lower, must not be used after
// it as they are: their files are recycled under higher numbers.
func (p *spares) oversized(size int) error {
	if err := p.discard(); err != nil {
		return err
	}
	image, err := p.images.mapZero(size)
	if err != nil {
		return err
	}
	b, err := p.create(size, vfs.Preallocate)
	if err != nil {
		return errors.Join(err, p.images.unmap(image))
	}
	b.image = image
	p.add(b)
	return nil
}

// discard gives up what is prepared: its numbers are too low after an oversized segment.
func (p *spares) discard() error {
	p.mu.Lock()
	ready := p.ready
	p.ready = nil
	p.mu.Unlock()
	var errs []error
	for _, b := range ready {
		errs = append(errs, b.file.Close())
		p.recycle(b.path, int64(len(b.image)))
		if b.pooled {
			p.images.give(b.image, 0)
		} else {
			errs = append(errs, p.images.unmap(b.image))
		}
	}
	return errors.Join(errs...)
}

// file makes a file of standard size, from an old one if there is one that is fit.
func (p *spares) file(size int, allocate func(f vfs.File, size int64) error) (*blank, error) {
	if from := p.popOld(); from != "" {
		b, err := p.reuse(from, size)
		if b != nil || err != nil {
			return b, err
		}
	}
	return p.create(size, allocate)
}

// reuse makes a new file from an old one. It returns nil for one that is shorter than it should be, which a crash may have left: its blocks are
// not all there. The old header is wiped before the file gets its new name: were it damaged, a replay could not tell that the file holds
// nothing. After an error the file is kept for another attempt, under the name that it has then.
func (p *spares) reuse(from string, size int) (*blank, error) {
	f, err := p.fs.Open(from, vfs.ReadWrite)
	if err != nil {
		if vfs.Exhausted(err) {
			p.keepOld(from)
		} else {
			p.doom(from)
		}
		return nil, fmt.Errorf("wal: recycle a segment: %w", err)
	}
	actual, err := f.Size()
	if err == nil && actual != int64(size) {
		p.doom(from)
		return nil, f.Close()
	}
	if err == nil {
		_, err = f.WriteAt(p.zeros[:], 0)
	}
	if err == nil {
		err = f.SyncData()
	}
	b, name, keep := p.next(), from, p.keepOld
	if err == nil {
		if err = p.fs.Rename(from, b.path); err == nil {
			name = b.path
			err = p.fs.SyncDir(p.dir)
		}
	} else if !errors.Is(err, vfs.ErrNoSpace) {
		keep = p.doom // a new file may be in a better place
	}
	if err != nil {
		keep(name)
		return nil, errors.Join(fmt.Errorf("wal: recycle a segment: %w", err), f.Close())
	}
	b.file = f
	return b, nil
}

// popOld takes a recyclable file, or returns "".
func (p *spares) popOld() (name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n := len(p.old); n > 0 {
		name = p.old[n-1]
		p.old = p.old[:n-1]
	}
	return name
}

// keepOld takes a recyclable file back.
func (p *spares) keepOld(name string) {
	p.mu.Lock()
	p.old = append(p.old, name)
	p.mu.Unlock()
}

// create makes a new file. What an error leaves behind is removed.
func (p *spares) create(size int, allocate func(f vfs.File, size int64) error) (*blank, error) {
	b := p.next()
	f, err := p.fs.Open(b.path, vfs.Create)
	if err != nil {
		return nil, fmt.Errorf("wal: create a segment: %w", err)
	}
	err = allocate(f, int64(size))
	if err == nil {
		err = f.Sync() // its size, which the syncs of data later rely on
	}
	if err == nil {
		err = p.fs.SyncDir(p.dir)
	}
	if err != nil {
		p.doom(b.path)
		return nil, errors.Join(fmt.Errorf("wal: create a segment: %w", err), f.Close(), p.removeDoomed())
	}
	b.file = f
	return b, nil
}

// doom remembers a file that is to be removed.
func (p *spares) doom(name string) {
	p.mu.Lock()
	p.doomed = append(p.doomed, name)
	p.mu.Unlock()
}

// removeDoomed removes the files that nothing needs. One that cannot be removed is remembered for the next time.
func (p *spares) removeDoomed() error {
	p.mu.Lock()
	doomed := p.doomed
	p.doomed = nil
	p.mu.Unlock()
	var errs []error
	for _, name := range doomed {
		if err := p.fs.Remove(name); err != nil && !errors.Is(err, iofs.ErrNotExist) {
			p.doom(name)
			errs = append(errs, fmt.Errorf("wal: remove an old segment: %w", err))
		}
	}
	return errors.Join(errs...)
}

func (p *spares) next() *blank {
	p.number++
	return &blank{number: p.number, path: path.Join(p.dir, FileName(p.number))}
}

// recycle keeps an old file for use as a new one, or has it removed by the next removeDoomed, and reports whether it was kept. The names
// need no directory sync: an old segment that comes back after a crash is older than what replay starts from.
func (p *spares) recycle(name string, size int64) (kept bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if size == int64(p.images.size) && len(p.old) < recyclableMax {
		p.old = append(p.old, name)
		return true
	}
	p.doomed = append(p.doomed, name)
	return false
}

func (p *spares) close() error {
	p.mu.Lock()
	p.holdLocked(math.MaxInt) // nothing is
	p.mu.Unlock()
	return errors.Join(p.discard(), p.removeDoomed())
}

package wal

import (
	"errors"
	"fmt"
	"path"
	"sync"

	"epochkv/internal/vfs"
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
// A recycled file needs no wiping. It has a new number, which its old header does not match, so that it counts as
// blank until its new header is written; and its old records do not match its new identity.
type spares struct {
	fs     vfs.FS
	dir    string
	images *images

	making sync.Mutex // held while a segment is made, which a slow device draws out; taken before mu
	number uint64     // last segment number used; guarded by making

	mu    sync.Mutex
	ready []*blank // prepared, by number
	want  int      // how many are to be; at most images.max - 2, so that one can be filled and one flushed
	old   []string // recyclable files of standard size
}

// blank is a prepared segment: a durable name, allocated blocks, a zero image.
type blank struct {
	file   vfs.File
	path   string
	number uint64
	image  []byte
	pooled bool
}

// take returns the first prepared blank, or makes one if there is none (ready is false then), which somebody waits for: but for the first, a new file
// is then allocated and not zeroed, a millisecond instead of some fifty; each of its syncs takes longer, as it changes what the file system knows
// of the blocks. It returns nil if all images are in use.
func (p *spares) take() (b *blank, ready bool, err error) {
	if b := p.pop(); b != nil {
		return b, true, nil
	}
	allocate := vfs.File.Preallocate
	if p.wantMore() { // the log is being opened; as good a segment as those to come
		allocate = vfs.PreallocateZeroed
	}
	p.making.Lock()
	defer p.making.Unlock()
	if b := p.pop(); b != nil { // what was being made
		return b, false, nil
	}
	b, err = p.make(allocate)
	return b, false, err
}

// pop takes a prepared blank, or returns nil.
func (p *spares) pop() (b *blank) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ready) > 0 {
		b = p.ready[0]
		p.ready = append(p.ready[:0], p.ready[1:]...)
	}
	return b
}

// wantMore raises the number of spares, because somebody has found none, and reports whether that is the first time.
func (p *spares) wantMore() (first bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	first = p.want == 0
	p.want = min(max(1, 2*p.want), p.images.max-2)
	return first
}

// prepare makes one spare if one is missing, and reports whether it did.
func (p *spares) prepare() (made bool, err error) {
	p.making.Lock()
	defer p.making.Unlock()
	p.mu.Lock()
	enough := len(p.ready) >= p.want
	p.mu.Unlock()
	if enough {
		return false, nil
	}
	b, err := p.make(vfs.PreallocateZeroed)
	if b != nil {
		p.mu.Lock()
		p.ready = append(p.ready, b)
		p.mu.Unlock()
	}
	return b != nil, err
}

// make makes a blank of standard size, or returns nil if all images are in use. The caller holds making.
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

// oversized makes a blank of its own size for one large record. The spare, whose number is lower, must not be used after
// it as it is: its file is recycled under a higher number.
func (p *spares) oversized(size int) (*blank, error) {
	p.making.Lock()
	defer p.making.Unlock()
	if err := p.discard(); err != nil {
		return nil, err
	}
	image, err := p.images.mapZero(size)
	if err != nil {
		return nil, err
	}
	b, err := p.create(size, vfs.File.Preallocate)
	if err != nil {
		return nil, errors.Join(err, p.images.unmap(image))
	}
	b.image = image
	return b, nil
}

// discard gives up what is prepared: its numbers are too low after an oversized segment. The caller holds making.
func (p *spares) discard() error {
	p.mu.Lock()
	ready := p.ready
	p.ready = nil
	p.mu.Unlock()
	var errs []error
	for _, b := range ready {
		p.images.give(b.image, 0)
		if err := b.file.Close(); err != nil {
			errs = append(errs, err)
			continue
		}
		_, err := p.recycle(b.path, int64(p.images.size))
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// file makes a file of standard size, from an old one if there is one. The caller holds making.
func (p *spares) file(size int, allocate func(f vfs.File, size int64) error) (*blank, error) {
	from := p.popOld()
	if from == "" {
		return p.create(size, allocate)
	}
	b := p.next()
	if err := p.fs.Rename(from, b.path); err != nil {
		return nil, fmt.Errorf("wal: recycle a segment: %w", err)
	}
	f, err := p.fs.Open(b.path, vfs.ReadWrite)
	if err != nil {
		return nil, fmt.Errorf("wal: recycle a segment: %w", err)
	}
	if err := p.fs.SyncDir(p.dir); err != nil {
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

// create makes a new file. What an error leaves behind is removed. The caller holds making.
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
		return nil, errors.Join(fmt.Errorf("wal: create a segment: %w", err), f.Close(), p.fs.Remove(b.path))
	}
	b.file = f
	return b, nil
}

func (p *spares) next() *blank {
	p.number++
	return &blank{number: p.number, path: path.Join(p.dir, FileName(p.number))}
}

// recycle keeps an old file for use as a new one, or removes it, and reports whether it was kept. The names need no
// directory sync: an old segment that comes back after a crash is older than what replay starts from.
func (p *spares) recycle(name string, size int64) (kept bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if size == int64(p.images.size) && len(p.old) < recyclableMax {
		p.old = append(p.old, name)
		return true, nil
	}
	if err := p.fs.Remove(name); err != nil {
		return false, fmt.Errorf("wal: remove an old segment: %w", err)
	}
	return false, nil
}

func (p *spares) close() error {
	p.making.Lock()
	defer p.making.Unlock()
	return p.discard()
}

// wantSpare wakes the goroutine that prepares spares.
func (l *Log) wantSpare() {
	select {
	case l.refill <- struct{}{}:
	default:
	}
}

// runSpares prepares spares until Close. It is best effort on a full device: the next rotation meets the error itself
// and can report it.
func (l *Log) runSpares() {
	defer l.background.Done()
	for {
		select {
		case <-l.stop:
			return
		case <-l.refill:
			made, err := l.spares.prepare()
			if l.preparing(err) == nil && made {
				l.wantSpare() // until there are enough
			}
		}
	}
}

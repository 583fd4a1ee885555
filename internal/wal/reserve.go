package wal

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"path"
	"strconv"
	"strings"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// reservePrefix begins the names of reserve files. They are not segments: a replay does not look at them.
const reservePrefix = "reserve-"

// reserve is some files of a segment's size that are kept back for a full device: their blocks are allocated, and a rename makes a segment of
// one. A segment that no other file can be made for takes one; segments that are given up, and new files once there is space, take its place.
// Whoever owns the log learns from Reserve how much of it is left, and lets only those commits rotate the log that make space. Guarded by spares.mu.
type reserve struct {
	target  int
	files   []string // file names
	pending int      // files that are about to be kept
	last    int      // number of the last name given out
	taken   int      // files that became segments
}

// adoptReserve finds what an earlier run has left of the reserve. What is too much, or of another size, is removed.
func (p *preallocator) adoptReserve(want int) error {
	p.reserve.target = want
	names, err := p.fs.List(p.dir)
	if err != nil {
		return fmt.Errorf("wal: %w", err)
	}
	for _, name := range names {
		digits, ours := strings.CutPrefix(name, reservePrefix)
		n, err := strconv.Atoi(digits)
		if !ours || err != nil {
			continue
		}
		p.reserve.last = max(p.reserve.last, n)
		name = path.Join(p.dir, name)
		if size, err := p.fs.Size(name); err != nil || size != int64(p.buffers.size) || len(p.reserve.files) == want {
			p.toRemove = append(p.toRemove, name)
			continue
		}
		p.reserve.files = append(p.reserve.files, name)
	}
	return nil
}

// missing gives out a name for one more file of the reserve, or "" if it is whole. The caller calls keep.
func (p *preallocator) nextReserveName() (name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := &p.reserve
	if len(r.files)+r.pending >= r.target {
		return ""
	}
	r.pending++
	r.last++
	return path.Join(p.dir, fmt.Sprintf("%s%d", reservePrefix, r.last))
}

// keep says what became of a name that missing gave out.
func (p *preallocator) recordReserveFile(name string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reserve.pending--
	if ok {
		p.reserve.files = append(p.reserve.files, name)
	}
}

// keepInReserve makes an old file part of the reserve, if some of that is missing. The rename needs no sync: an old segment that comes back
// after a crash is older than what replay starts from.
func (p *preallocator) addToReserve(old string, size int64) (kept bool) {
	if size != int64(p.buffers.size) {
		return false
	}
	name := p.nextReserveName()
	if name == "" {
		return false
	}
	kept = p.fs.Rename(old, name) == nil // else the file is treated as any other old one
	p.recordReserveFile(name, kept)
	return kept
}

// fillReserve makes one file that the reserve lacks, and reports whether it did.
func (p *preallocator) fillReserve() (made bool, err error) {
	name := p.nextReserveName()
	if name == "" {
		return false, nil
	}
	defer func() { p.recordReserveFile(name, made) }()
	f, err := p.fs.Open(name, vfs.Create)
	if err != nil {
		return false, fmt.Errorf("wal: reserve: %w", err)
	}
	err = vfs.Preallocate(f, int64(p.buffers.size))
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = p.fs.SyncDir(p.dir) // or a crash gives the space to others
	}
	if err = errors.Join(err, f.Close()); err != nil {
		p.scheduleRemoval(name)
		return false, errors.Join(fmt.Errorf("wal: reserve: %w", err), p.removeScheduled())
	}
	return true, nil
}

// prepareReserved is prepare with a file of the reserve, for a writer that waits. Without one it returns the cause for which no other could be made.
func (p *preallocator) prepareFromReserve(cause error) (made bool, err error) {
	p.mu.Lock()
	n := len(p.reserve.files)
	if n == 0 {
		p.mu.Unlock()
		return false, cause
	}
	name := p.reserve.files[n-1]
	p.reserve.files = p.reserve.files[:n-1]
	p.mu.Unlock()
	buffer, err := p.buffers.take()
	if buffer == nil || err != nil {
		p.mu.Lock()
		p.reserve.files = append(p.reserve.files, name)
		p.mu.Unlock()
		return false, err
	}
	b, err := p.reuse(name, p.buffers.size)
	if b == nil {
		p.buffers.put(buffer, 0)
		return false, cmp.Or(err, cause)
	}
	b.buffer, b.pooled = buffer, true
	p.add(b)
	p.mu.Lock()
	p.reserve.taken++
	p.mu.Unlock()
	return true, nil
}

// Reserve is how many files are kept for a full device, and how many became segments since Open: for each of them the device was full.
func (l *Log) Reserve() (kept, taken int) {
	l.preallocator.mu.Lock()
	defer l.preallocator.mu.Unlock()
	return len(l.preallocator.reserve.files), l.preallocator.reserve.taken
}

// FillReserve makes what the reserve lacks. The error matches vfs.ErrNoSpace while there is no space; no error of it is final.
func (l *Log) FillReserve() error {
	for {
		if made, err := l.preallocator.fillReserve(); !made || err != nil {
			return err
		}
	}
}

// Unopened returns a segment that takes no record: for a store whose log cannot be given a file yet. Its successor begins at the same
// epoch.
func (l *Log) Unopened(first keys.Epoch) *Segment {
	s := &Segment{first: first, begin: headerPage, durable: l.durable}
	s.refused.Store(true)
	s.tail.Store(math.MaxUint32)
	s.sealed.Store(1)
	return s
}

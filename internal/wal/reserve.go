package wal

import (
	"cmp"
	"errors"
	"fmt"
	iofs "io/fs"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// reservePrefix begins the names of files that hold no record any more: those of the reserve, and those that were recycled and wait to become
// segments. A replay does not read them.
const reservePrefix = "reserve-"

// reserve is a few files of a segment's size for the time when the device is full. Their blocks are
// allocated, and a rename makes a segment of such a file. A segment for which no other file can be made takes
// one. Truncated segments, and new files once there is space, fill the reserve again. The owner of the log
// reads from Log.Reserve how many files are left, and then lets only those commits rotate the log that free
// space. Guarded by preallocator.mu.
type reserve struct {
	target  int
	files   []string // file names
	pending int      // files that are being added
	last    int      // number of the last name given out
	taken   int      // files that became segments, or made room for one
}

// parseReserveName is the number in the name of a file that holds no record any more.
func parseReserveName(name string) (number int, ok bool) {
	digits, found := strings.CutPrefix(name, reservePrefix)
	number, err := strconv.Atoi(digits)
	return number, found && err == nil
}

// SmallerSegmentBytes is the size of the segments of an earlier run, if Open with segments of size bytes would remove its reserve because that
// has smaller files, and has fewer of this size than a reserve has; otherwise 0. Without a reserve, the newest segment of the log tells
// whether its files are smaller. Of several sizes it is the smallest: a record may have had a segment of its own, and each file that has the size, or
// more, gives a segment room.
func SmallerSegmentBytes(fs vfs.FS, dataDir string, size int64, reserve int) (int64, error) {
	ofReserve, ofLog, err := earlierSizes(fs, Dir(dataDir))
	if err != nil {
		return 0, err
	}
	ready := 0
	for _, found := range ofReserve {
		if found == size {
			ready++
		}
	}
	smallest := size
	switch n := len(ofLog); {
	case len(ofReserve) > 0 && ready < reserve:
		smallest = slices.Min(ofReserve)
	case len(ofReserve) == 0 && n > 0 && ofLog[n-1] < size:
		smallest = slices.Min(ofLog)
	}
	if smallest >= size {
		return 0, nil
	}
	return smallest, nil
}

// earlierSizes are the sizes of the files that hold no record, and of the segments, by number. It leaves out files that are not as large as any
// segment, for instance because a torn tail was cut. Without the directory there are none.
func earlierSizes(fs vfs.FS, dir string) (ofReserve, ofLog []int64, err error) {
	names, err := fs.List(dir)
	if errors.Is(err, iofs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("wal: %w", err)
	}
	for _, name := range names {
		size, err := fs.Size(path.Join(dir, name))
		if err != nil || size < SegmentBytesMin || size%pageSize != 0 {
			continue
		}
		if _, ours := parseReserveName(name); ours {
			ofReserve = append(ofReserve, size)
		} else if _, ours := parseFileName(name); ours {
			ofLog = append(ofLog, size)
		}
	}
	return ofReserve, ofLog, nil
}

// adoptReserve finds the reserve files of an earlier run, and what it had recycled. It removes files beyond the target and what may be
// recycled, files of another size, and those for which the device has no blocks.
func (p *preallocator) adoptReserve(want int) error {
	p.reserve.target = want
	names, err := p.fs.List(p.dir)
	if err != nil {
		return fmt.Errorf("wal: %w", err)
	}
	for _, name := range names {
		n, ours := parseReserveName(name)
		if !ours {
			continue
		}
		p.reserve.last = max(p.reserve.last, n)
		name = path.Join(p.dir, name)
		switch size, err := p.fs.Size(name); {
		case err != nil || !p.usable(name, size):
			p.toRemove = append(p.toRemove, name)
		case len(p.reserve.files) < want:
			p.reserve.files = append(p.reserve.files, name)
		case len(p.recyclable) < recyclableMax:
			p.recyclable = append(p.recyclable, name)
		default:
			p.toRemove = append(p.toRemove, name)
		}
	}
	return nil
}

// usable reports whether a file of an earlier run can become a segment: it has the size of one, and all of its blocks, of which it gets those that
// it lacks. In a sparse copy of a data directory, what was allocated and never written is a hole, and so are zeros; and a copy may share its blocks
// with the original, which then shares them, too: on a full device, the first record that is written there would end the log.
func (p *preallocator) usable(name string, size int64) bool {
	if size != int64(p.buffers.size) {
		return false
	}
	f, err := p.fs.Open(name, vfs.ReadWrite)
	if err != nil {
		return false
	}
	own := !vfs.SharesBlocks(f)
	return errors.Join(vfs.Preallocate(f, size), f.Close()) == nil && own
}

// newReserveNameLocked is a name without a file.
func (p *preallocator) newReserveNameLocked() string {
	p.reserve.last++
	return path.Join(p.dir, fmt.Sprintf("%s%d", reservePrefix, p.reserve.last))
}

// nextReserveName returns a name for one more file of the reserve, or "" if the reserve is complete. The
// caller calls recordReserveFile.
func (p *preallocator) nextReserveName() (name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := &p.reserve
	if len(r.files)+r.pending >= r.target {
		return ""
	}
	r.pending++
	return p.newReserveNameLocked()
}

// recordReserveFile records whether a file was made under a name from nextReserveName.
func (p *preallocator) recordReserveFile(name string, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.reserve.pending--
	if ok {
		p.reserve.files = append(p.reserve.files, name)
	}
}

// addToReserve makes an old file part of the reserve, if the reserve is not complete. The rename needs no
// sync: an old segment that comes back after a crash is older than the epoch from which replay starts.
func (p *preallocator) addToReserve(old string, size int64) (kept bool) {
	if size != int64(p.buffers.size) {
		return false
	}
	name := p.nextReserveName()
	if name == "" {
		return false
	}
	kept = p.fs.Rename(old, name) == nil // else the file is treated like other old files
	p.recordReserveFile(name, kept)
	return kept
}

// fillReserve makes one missing file of the reserve, and reports whether it did.
func (p *preallocator) fillReserve() (made bool, err error) {
	name := p.nextReserveName()
	if name == "" {
		return false, nil
	}
	defer func() { p.recordReserveFile(name, made) }()
	named := p.names.begin()
	f, err := p.fs.Open(name, vfs.Create)
	if err != nil {
		return false, fmt.Errorf("wal: reserve: %w", err)
	}
	err = vfs.Preallocate(f, int64(p.buffers.size))
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = p.names.sync(named) // otherwise a crash could free the space
	}
	if err = errors.Join(err, f.Close()); err != nil {
		p.scheduleRemoval(name)
		return false, errors.Join(fmt.Errorf("wal: reserve: %w", err), p.removeScheduled())
	}
	return true, nil
}

// prepareFromReserve is prepare with a file of the reserve, for a writer that waits. Without such a file it
// returns the error of the attempt to make another file.
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

// oversizedFromReserve is oversized on a full device: if that gives the segment room, the files of the reserve, those that wait to become
// segments, and the segments that are ready are removed for it. Otherwise it returns the error of the attempt to make it beside them.
func (p *preallocator) oversizedFromReserve(size int, cause error) error {
	free, err := p.fs.Free(p.dir)
	p.mu.Lock()
	n := len(p.reserve.files)
	if err != nil || free+int64(n+len(p.recyclable)+len(p.ready))*int64(p.buffers.size) < int64(size) {
		p.mu.Unlock()
		return cause
	}
	p.toRemove = append(p.toRemove, p.reserve.files...)
	p.reserve.files = nil
	p.reserve.taken += n
	p.reserve.pending += n // until the segment is made, the reserve does not take the room again
	p.mu.Unlock()
	err = p.discard()
	_, failed := p.releaseOld(0)
	if err = errors.Join(err, failed); err != nil {
		err = cause
	} else {
		err = p.oversized(size)
	}
	p.mu.Lock()
	p.reserve.pending -= n
	p.mu.Unlock()
	return err
}

// Reserve is how many files are kept for a full device, and how many became segments since Open, or made room for one, because the
// device was full.
func (l *Log) Reserve() (kept, taken int) {
	l.preallocator.mu.Lock()
	defer l.preallocator.mu.Unlock()
	return len(l.preallocator.reserve.files), l.preallocator.reserve.taken
}

// FillReserve makes the missing files of the reserve. The error matches vfs.ErrNoSpace while there is no
// space; no error is final.
func (l *Log) FillReserve() error {
	for {
		if made, err := l.preallocator.fillReserve(); !made || err != nil {
			return err
		}
	}
}

// Unopened returns a segment that takes no record, for a store whose log cannot get a file yet. The next
// segment begins at the same epoch.
func (l *Log) Unopened(first keys.Epoch) *Segment {
	s := &Segment{first: first, begin: headerPage, durable: l.durable}
	s.refused.Store(true)
	s.tail.Store(math.MaxUint32)
	s.sealed.Store(1)
	return s
}

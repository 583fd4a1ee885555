package wal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// windowBytes is how much of a file is read at a time. The window grows to the size of a larger record.
const windowBytes = 1 << 20

// window is a part of a file in a buffer that is used again: segments may be larger than memory.
type window struct {
	file vfs.File
	size int64 // of the file
	off  int64 // of buf[0]
	buf  []byte
}

// unreadableError means that the device cannot read what is at an offset of a file.
type unreadableError struct {
	offset int64
	cause  error
}

func (e *unreadableError) Error() string { return fmt.Sprintf("wal: read: %v", e.cause) }

func (e *unreadableError) Unwrap() error { return e.cause }

// at returns n bytes at off, valid until the next call; fewer only at the end of the file. Errors: *unreadableError, and those of the
// file system.
func (w *window) at(off int64, n int) ([]byte, error) {
	if off >= w.off && off+int64(n) <= w.off+int64(len(w.buf)) {
		start := off - w.off
		return w.buf[start : start+int64(n)], nil
	}
	if off >= w.size {
		return nil, nil
	}
	want := int(min(max(int64(n), windowBytes), w.size-off))
	if cap(w.buf) < want {
		w.buf = make([]byte, want)
	}
	w.buf = w.buf[:want]
	w.off = off
	read, err := w.file.ReadAt(w.buf, off)
	if errors.Is(err, vfs.ErrDevice) {
		read, err = w.readPages(read)
	}
	w.buf = w.buf[:read]
	switch {
	case read >= n || err == nil || errors.Is(err, io.EOF):
		return w.buf[:min(n, read)], nil
	case errors.Is(err, vfs.ErrDevice):
		return nil, &unreadableError{off + int64(read), err}
	}
	w.buf = w.buf[:0]
	return nil, fmt.Errorf("wal: read: %w", err)
}

// readPages goes on with a read after so many bytes, page by page, up to one that the device cannot read. The kernel reads many pages at
// once, and may return none of them because of one.
func (w *window) readPages(read int) (int, error) {
	for read < len(w.buf) {
		end := min(read+pageSize-int((w.off+int64(read))%pageSize), len(w.buf))
		n, err := w.file.ReadAt(w.buf[read:end], w.off+int64(read))
		if read += n; err != nil {
			return read, err
		}
	}
	return read, nil
}

// open moves the window to the beginning of a file.
func (w *window) open(fs vfs.FS, path string) error {
	f, err := fs.Open(path, vfs.ReadOnly)
	if err != nil {
		return fmt.Errorf("wal: %w", err)
	}
	size, err := f.Size()
	if err != nil {
		return errors.Join(fmt.Errorf("wal: %w", err), f.Close())
	}
	w.file, w.size, w.off, w.buf = f, size, 0, w.buf[:0]
	return nil
}

// segmentReader reads the records of one segment in order.
type segmentReader struct {
	window
	seed       uint32
	pos        int64            // of the next record
	unreadable *unreadableError // why next has found no intact record, if that is why
}

func (r *segmentReader) start(fs vfs.FS, s SegmentInfo) error {
	r.seed, r.pos, r.unreadable = seedOf(s.identity), headerPage, nil
	return r.open(fs, s.File)
}

// next returns the record at pos and moves after it, or reports false if there is no intact record, or one that the device cannot
// read. The body is valid until the next call.
func (r *segmentReader) next() (rec record, ok bool, err error) {
	rec, ok, err = r.record(r.pos)
	if errors.As(err, &r.unreadable) {
		err = nil
	}
	if ok {
		r.pos += int64(rec.space)
	}
	return rec, ok, err
}

// lost is why the device cannot read the record of an epoch at pos, or nil. What has the header of another record is none: it is an
// old content of a recycled file, and its length may be anything.
func (r *segmentReader) lost(e keys.Epoch) *unreadableError {
	if r.unreadable == nil {
		return nil
	}
	if head, err := r.at(r.pos, recordHeaderSize); err == nil && (len(head) < recordHeaderSize || epochAt(head) != e) {
		return nil
	}
	return r.unreadable
}

// record decodes the record at off.
func (r *segmentReader) record(off int64) (rec record, ok bool, err error) {
	head, err := r.at(off, recordHeaderSize)
	if err != nil || len(head) < recordHeaderSize {
		return record{}, false, err
	}
	length, fits := recordLength(head, r.size-off)
	if !fits {
		return record{}, false, nil
	}
	src, err := r.at(off, int(recordSpace(length)))
	if err != nil {
		return record{}, false, err
	}
	rec, ok = decodeRecord(src, r.seed)
	return rec, ok, nil
}

// durabilityProof is what the bytes after a record that cannot be read prove.
type durabilityProof struct {
	durable keys.Epoch // the largest durable epoch that a later record of this segment states
	end     int64      // after the last intact record, or after the bad one if its header is plausible; else its offset
}

// findProof searches for intact records of the segment after the bad record at pos, whose epoch would be bad.
func (r *segmentReader) findProof(bad keys.Epoch) (durabilityProof, error) {
	t, unreadable := durabilityProof{end: r.pos}, new(unreadableError)
	head, err := r.at(r.pos, recordHeaderSize)
	if err != nil && !errors.As(err, &unreadable) {
		return t, err
	}
	if len(head) == recordHeaderSize && epochAt(head) == bad {
		length, fits := recordLength(head, r.size-r.pos)
		t.end = r.pos + recordHeaderSize
		if fits {
			t.end = r.pos + int64(recordSpace(length))
		}
	}
	err = r.later(bad, func(off int64, rec *record) error {
		t.durable, t.end = max(t.durable, rec.durable), off+int64(rec.space)
		return nil
	})
	return t, err
}

// later calls fn for the intact records of the segment after the bad record at pos, whose epoch would be bad. The length
// of the bad record cannot be trusted, so later tries every offset at which a record could start. It compares the epoch
// first, which must fit the distance, so that it computes few checksums over old contents of a recycled file. Clients may
// have chosen these, so that a checksum must not take longer for a longer record (rangeSums). It passes over what the device
// cannot read.
func (r *segmentReader) later(bad keys.Epoch, fn func(off int64, rec *record) error) error {
	unreadable, sums := new(unreadableError), rangeSums{file: r.file, size: r.size}
	for off := r.pos + recordAlign; off+recordHeaderSize <= r.size; off += recordAlign {
		head, err := r.at(off, recordHeaderSize)
		if errors.As(err, &unreadable) {
			off = unreadable.offset&^(pageSize-1) + pageSize - recordAlign // on with the next page
			continue
		}
		if err != nil || len(head) < recordHeaderSize {
			return err
		}
		reach := keys.Epoch((off - r.pos + recordHeaderSize - 1) / recordHeaderSize)
		e := epochAt(head)
		skipped := r.pos == headerPage && e >= bad+EpochWindow && e-bad-EpochWindow <= reach // the bad record may be a skip
		if (e <= bad || e-bad > reach) && !skipped {
			continue
		}
		if plausible, err := r.plausible(&sums, off, head); err != nil {
			return err
		} else if !plausible {
			continue
		}
		rec, ok, err := r.record(off)
		if err != nil && !errors.As(err, &unreadable) {
			return err
		}
		if !ok {
			continue
		}
		if err := fn(off, &rec); err != nil {
			return err
		}
		off += int64(rec.space) - recordAlign
	}
	return nil
}

// plausible reports whether a record may be at an offset, if head is its header: a long one only if its checksum matches.
func (r *segmentReader) plausible(sums *rangeSums, off int64, head []byte) (bool, error) {
	length, fits := recordLength(head, r.size-off)
	if !fits || length <= pageSize {
		return fits, nil
	}
	want := binary.LittleEndian.Uint32(head)
	sum, ok, err := sums.sum(sumSeed(r.seed, length), off+epochOffset, off+int64(recordSpace(length)))
	return ok && sum == want, err
}

func epochAt(head []byte) keys.Epoch {
	return keys.Epoch(binary.LittleEndian.Uint64(head[epochOffset:])) & keys.MaxEpoch
}

// Segments lists the log's files with records, oldest first, without reading the records. The error about an
// unreadable header is in the segment's Damage.
func Segments(fs vfs.FS, dataDir string) ([]SegmentInfo, error) {
	rec, _, err := list(fs, Dir(dataDir))
	return rec.Segments, err
}

// ReadSegment calls fn for every intact record of a segment that no later segment supersedes, whatever its flags, and
// changes nothing.
func ReadSegment(fs vfs.FS, s SegmentInfo, fn func(Record) error) (err error) {
	if s.Damage != nil || s.Superseded() {
		return s.Damage
	}
	var r segmentReader
	if err := r.start(fs, s); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.file.Close()) }()
	for {
		at := r.pos
		one, ok, err := r.next()
		if err != nil || !ok || s.limited(one.epoch) && one.flags != flagClose {
			return err
		}
		if err := fn(Record{at, one.epoch, one.durable, one.flags, one.body}); err != nil {
			return err
		}
	}
}

var errTorn = errors.New("wal: the rest was never acknowledged")

// ReadAroundDamage is ReadSegment, and goes on after damage with the intact records. last is the last epoch of the segment, and zero for the newest
// segment: what is missing there after everything that is proven to have been durable is no damage, but the end of the log.
func ReadAroundDamage(fs vfs.FS, s SegmentInfo, last keys.Epoch, fn func(Record) error) (err error) {
	next, pos, closed := s.First, int64(headerPage), false
	err = ReadSegment(fs, s, func(one Record) error {
		next, pos, closed = one.after(), one.Offset+int64(recordSpace(uint32(recordHeaderSize+len(one.Body)))), one.Flags == flagClose
		return fn(one)
	})
	if err != nil || closed || s.Damage != nil || s.limited(next) {
		return err
	}
	var r segmentReader
	if err := r.start(fs, s); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.file.Close()) }()
	r.pos = pos
	durable := last
	if last == 0 {
		t, err := r.findProof(next)
		if err != nil {
			return err
		}
		durable = t.durable
	}
	err = r.later(next, func(off int64, one *record) error {
		if next > durable && one.epoch != next || last != 0 && one.epoch > last {
			return errTorn
		}
		found := Record{off, one.epoch, one.durable, one.flags, one.body}
		next = found.after()
		return fn(found)
	})
	if errors.Is(err, errTorn) {
		return nil
	}
	return err
}

// after is the epoch of the record after this one.
func (r *Record) after() keys.Epoch {
	if r.HoldsEpoch() {
		return r.Epoch + 1
	}
	return max(r.Epoch, r.SkipsTo())
}

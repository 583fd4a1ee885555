package archive

import (
	"fmt"
	"io"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// Reader reads the records of a file in order. It is for one goroutine. Next verifies everything: io.EOF means that every record that
// was written was returned.
type Reader struct {
	frameReader
	header Header // constant

	last   Link
	count  uint64
	loads  uint32
	oldest uint64
	newest uint64
	info   Info // after io.EOF
}

// NewReader reads the header of a file. The name is for errors.
func NewReader(file string, src io.Reader) (*Reader, error) {
	r := &Reader{frameReader: newFrameReader(file, src)}
	r.tail = r.trailer
	head := make([]byte, headerSize)
	err := r.read(head)
	if err != nil {
		return nil, err
	}
	if r.header, err = decodeHeader(file, 0, head); err != nil {
		return nil, err
	}
	r.last = r.header.before()
	return r, nil
}

// Header is that of the file.
func (r *Reader) Header() Header { return r.header }

// Info is the trailer, once Next has returned io.EOF.
func (r *Reader) Info() Info { return r.info }

// after is the point after a record that was read, if before is the one before it.
func (r *Reader) after(before Point, rec *Record) Point {
	return Point{rec.Epoch, rec.Term, newer(before.Time, fromMicroseconds(r.newest))}
}

// Next returns the next record, or io.EOF at the end of a file that is whole. Errors: *DamageError, ErrNewerFormat, and those of the
// source.
func (r *Reader) Next() (rec Record, err error) {
	flags, err := r.byte()
	if err != nil {
		return rec, err
	}
	if flags != 0 && flags != flagNoOp && flags != flagSkip && (flags != flagLoad || !r.header.Loads) {
		return rec, fmt.Errorf("%w: %s has a record with flags %#x", ErrNewerFormat, r.file, flags)
	}
	var fields [3]uint64
	for i := range fields {
		if fields[i], err = r.uvarint(); err != nil {
			return rec, err
		}
	}
	epoch, term, length := fields[0], fields[1], fields[2]
	rec = Record{Epoch: r.last.Epoch + keys.Epoch(epoch), Term: r.last.Term + keys.Term(term), Skipped: flags == flagSkip, Load: flags == flagLoad}
	if epoch > uint64(keys.MaxEpoch) || rec.Term < r.last.Term || !rec.follows(r.last) {
		return rec, r.damaged(fmt.Sprintf("epoch %d of term %d after epoch %d of term %d", rec.Epoch, rec.Term, r.last.Epoch, r.last.Term))
	}
	if length > wal.BodyBytesMax || (length == 0) != (flags == flagNoOp || flags == flagSkip) {
		return rec, r.damaged(fmt.Sprintf("a record of %d bytes with flags %d", length, flags))
	}
	if rec.Body, err = r.bytes(int(length)); err != nil {
		return rec, err
	}
	return rec, r.note(&rec)
}

// note checks a record and counts it.
func (r *Reader) note(rec *Record) error {
	if err := rec.validate(); err != nil {
		return r.damaged(fmt.Sprintf("epoch %d: %v", rec.Epoch, err))
	}
	at, err := rec.CommitTime()
	if err != nil {
		return r.damaged(fmt.Sprintf("epoch %d: %v", rec.Epoch, err))
	}
	if at != 0 && (r.oldest == 0 || at < r.oldest) {
		r.oldest = at
	}
	r.newest = max(r.newest, at)
	r.last = rec.Link()
	if r.count++; rec.Load {
		r.loads++
	}
	return nil
}

// trailer reads the trailer and compares it with what was read.
func (r *Reader) trailer() error {
	var src [trailerSize]byte
	if err := r.read(src[:hashOffset]); err != nil {
		return err
	}
	sum := [32]byte(r.hash.Sum(nil))
	if err := r.read(src[hashOffset:]); err != nil {
		return err
	}
	if err := r.atEnd(); err != nil {
		return err
	}
	i, err := decodeTrailer(r.file, r.offset, src[:])
	if err != nil {
		return err
	}
	switch {
	case i.SHA256 != sum:
		return r.damaged("the SHA-256 of the file does not match")
	case i.Header != r.header || i.Count != r.count || i.Loads != r.loads || i.Last != r.last || i.RawBytes != r.rawRead ||
		microseconds(i.Oldest) != r.oldest || microseconds(i.Newest) != r.newest:
		return r.damaged("the trailer does not describe the records")
	}
	r.info = i
	return nil
}

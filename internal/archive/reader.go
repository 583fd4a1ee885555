package archive

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/wal"
)

// decoder decompresses the frames of all readers.
var decoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(frameRawMax), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		panic("archive: options of the compression: " + err.Error())
	}
	return d
})

// Reader reads the records of a file in order. It is for one goroutine. Next verifies everything: io.EOF means that every record that
// was written was returned.
type Reader struct {
	// Constant.
	file   string
	src    io.Reader
	hash   hash.Hash // of what was read
	header Header

	offset  int64  // in the file
	buf     []byte // compressed frame
	raw     []byte // uncompressed bytes that are not used yet; a record that goes on in the next frame is moved to its beginning
	used    int    // of raw
	rawRead int64  // uncompressed bytes of all frames
	ended   bool   // the end of the frames was read
	last    Link
	count   uint64
	oldest  uint64
	newest  uint64
	body    []byte // of a record
	info    Info   // after io.EOF
}

// NewReader reads the header of a file. The name is for errors.
func NewReader(file string, src io.Reader) (*Reader, error) {
	r := &Reader{file: file, src: src, hash: sha256.New()}
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

func (r *Reader) damaged(reason string) error { return &DamageError{r.file, r.offset, reason} }

// read fills a buffer.
func (r *Reader) read(p []byte) error {
	n, err := io.ReadFull(r.src, p)
	r.hash.Write(p[:n])
	switch {
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return r.damaged("the file is cut short")
	case err != nil:
		return fmt.Errorf("archive: read %s at offset %d: %w", r.file, r.offset, err)
	}
	r.offset += int64(n)
	return nil
}

// Next returns the next record, or io.EOF at the end of a file that is whole. Errors: *DamageError, ErrNewerFormat, and those of the
// source.
func (r *Reader) Next() (rec Record, err error) {
	flags, err := r.byte()
	if err != nil {
		return rec, err
	}
	if flags&^flagsMask != 0 || flags == flagsMask {
		return rec, fmt.Errorf("%w: %s has a record with flags %#x", ErrNewerFormat, r.file, flags)
	}
	var fields [3]uint64
	for i := range fields {
		if fields[i], err = r.uvarint(); err != nil {
			return rec, err
		}
	}
	epoch, term, length := fields[0], fields[1], fields[2]
	rec = Record{Epoch: r.last.Epoch + keys.Epoch(epoch), Term: r.last.Term + keys.Term(term), Skipped: flags == flagSkip}
	if epoch > uint64(keys.MaxEpoch) || rec.Term < r.last.Term || !rec.follows(r.last) {
		return rec, r.damaged(fmt.Sprintf("epoch %d of term %d after epoch %d of term %d", rec.Epoch, rec.Term, r.last.Epoch, r.last.Term))
	}
	if length > wal.BodyBytesMax || (length == 0) != (flags != 0) {
		return rec, r.damaged(fmt.Sprintf("a record of %d bytes with flags %d", length, flags))
	}
	if rec.Body, err = r.bytes(int(length)); err != nil {
		return rec, err
	}
	return rec, r.note(&rec)
}

// note checks a record and counts it.
func (r *Reader) note(rec *Record) error {
	if err := validBody(rec.Body); err != nil {
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
	r.count++
	return nil
}

// byte is the next byte of the records, or io.EOF at their end.
func (r *Reader) byte() (byte, error) {
	for r.used == len(r.raw) {
		if r.ended {
			return 0, io.EOF
		}
		if err := r.frame(); err != nil {
			return 0, err
		}
	}
	b := r.raw[r.used]
	r.used++
	return b, nil
}

// uvarint is the next number of the records.
func (r *Reader) uvarint() (v uint64, err error) {
	for shift := 0; shift < 64; shift += 7 {
		b, err := r.byte()
		if err != nil {
			return 0, r.cut(err)
		}
		v |= uint64(b&0x7f) << shift
		if b < 0x80 {
			if shift == 63 && b > 1 || shift > 0 && b == 0 {
				return 0, r.damaged("a number has another form than it was written in")
			}
			return v, nil
		}
	}
	return 0, r.damaged("a number is too long")
}

// cut replaces io.EOF inside a record.
func (r *Reader) cut(err error) error {
	if errors.Is(err, io.EOF) {
		return r.damaged("the last record is cut short")
	}
	return err
}

// bytes are the next n bytes of the records. Memory grows with what is read, and not with what a length says.
func (r *Reader) bytes(n int) ([]byte, error) {
	if n <= len(r.raw)-r.used {
		body := r.raw[r.used : r.used+n : r.used+n]
		r.used += n
		return body, nil
	}
	r.body = r.body[:0]
	for len(r.body) < n {
		b, err := r.byte()
		if err != nil {
			return nil, r.cut(err)
		}
		r.body = append(r.body, b)
		more := min(n-len(r.body), len(r.raw)-r.used)
		r.body = append(r.body, r.raw[r.used:r.used+more]...)
		r.used += more
	}
	return r.body, nil
}

// frame reads the next frame, or the end of the frames and the trailer: then ended is set.
func (r *Reader) frame() error {
	r.buf = slices.Grow(r.buf[:0], frameHeaderSize)
	head, le := r.buf[:frameHeaderSize], binary.LittleEndian
	if err := r.read(head); err != nil {
		return err
	}
	length, raw := le.Uint32(head), le.Uint32(head[4:])
	if length == 0 {
		if !allZero(head) {
			return r.damaged("the end of the frames is not of zeros")
		}
		return r.trailer()
	}
	if length > frameBytesMax || raw == 0 || raw > frameRawMax {
		return r.damaged("a frame has an impossible length")
	}
	frame := slices.Grow(head, int(length))[:frameHeaderSize+length]
	r.buf = frame
	if err := r.read(frame[frameHeaderSize:]); err != nil {
		return err
	}
	if frameSum(frame) != le.Uint32(frame[8:]) {
		return r.damaged("the checksum of a frame does not match")
	}
	out, err := decoder().DecodeAll(frame[frameHeaderSize:], slices.Grow(r.raw[:0], int(raw)))
	if err != nil || len(out) != int(raw) {
		return r.damaged(fmt.Sprintf("a frame does not decompress to its %d bytes: %v", raw, err))
	}
	r.raw, r.used = out, 0
	r.rawRead += int64(raw)
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
	if n, err := io.ReadFull(r.src, make([]byte, 1)); n != 0 {
		return r.damaged("the file is longer than it was")
	} else if !errors.Is(err, io.EOF) {
		return fmt.Errorf("archive: read %s at offset %d: %w", r.file, r.offset, err)
	}
	i, err := decodeTrailer(r.file, r.offset, src[:])
	if err != nil {
		return err
	}
	switch {
	case i.SHA256 != sum:
		return r.damaged("the SHA-256 of the file does not match")
	case i.Header != r.header || i.Count != r.count || i.Last != r.last || i.RawBytes != r.rawRead ||
		microseconds(i.Oldest) != r.oldest || microseconds(i.Newest) != r.newest:
		return r.damaged("the trailer does not describe the records")
	}
	r.info, r.ended = i, true
	return nil
}

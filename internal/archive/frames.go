package archive

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// Frames are compressed bytes with checksums: the records of an archive file, and the entries of a bulk load. format.go has the diagram.

// frameWriter appends frames to an object in memory.
type frameWriter struct {
	encoder  *zstd.Encoder
	raw      []byte // of the frame that is being filled; at most frameRawMax
	out      []byte // of the object
	rawBytes int64  // that were added
}

// compressedRest is for headers, of frames and of blocks, of which bytes that cannot be compressed have less than a part of so many.
const compressedRest = 1 << 10

func newFrameWriter() frameWriter {
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(frameRawMax), zstd.WithEncoderCRC(false))
	if err != nil {
		panic("archive: options of the compression: " + err.Error())
	}
	return frameWriter{encoder: encoder}
}

// reset begins an object, of which nothing is there yet.
func (w *frameWriter) reset() { w.raw, w.out, w.rawBytes = w.raw[:0], w.out[:0], 0 }

// release gives up the memory of an object that is not needed any more, if it is larger than most.
func (w *frameWriter) release(most int64) {
	if int64(cap(w.out)) > most {
		w.out = nil
	}
}

// add adds bytes to the frames. Room for many comes at once: an object that grows step by step is in memory twice with each step.
func (w *frameWriter) add(p []byte) {
	if len(p) > frameRawMax {
		w.out = slices.Grow(w.out, len(w.raw)+len(p)+len(p)/compressedRest+frameRawMax)
	}
	w.rawBytes += int64(len(p))
	for len(p) > 0 {
		if w.raw == nil {
			w.raw = make([]byte, 0, frameRawMax)
		}
		n := min(len(p), frameRawMax-len(w.raw))
		w.raw = append(w.raw, p[:n]...)
		if p = p[n:]; len(w.raw) == frameRawMax {
			w.endFrame()
		}
	}
}

func (w *frameWriter) endFrame() {
	if len(w.raw) == 0 {
		return
	}
	at := len(w.out)
	w.out = w.encoder.EncodeAll(w.raw, append(w.out, make([]byte, frameHeaderSize)...))
	putFrameHeader(w.out[at:], len(w.raw))
	w.raw = w.raw[:0]
}

// end ends the frames.
func (w *frameWriter) end() {
	w.endFrame()
	w.out = append(w.out, make([]byte, frameHeaderSize)...)
}

// Bytes is about the size of the object so far: what is not compressed yet counts whole.
func (w *frameWriter) Bytes() int64 { return int64(len(w.out) + len(w.raw)) }

// putFrameHeader fills the header of a frame that is complete.
func putFrameHeader(frame []byte, raw int) {
	le := binary.LittleEndian
	le.PutUint32(frame, uint32(len(frame)-frameHeaderSize))
	le.PutUint32(frame[4:], uint32(raw))
	le.PutUint32(frame[8:], frameSum(frame))
}

// frameSum is the checksum of a frame.
func frameSum(frame []byte) uint32 {
	return crc32.Update(crc32.Checksum(frame[:8], castagnoli), castagnoli, frame[frameHeaderSize:])
}

// decoder decompresses the frames of all readers.
var decoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(frameRawMax), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		panic("archive: options of the compression: " + err.Error())
	}
	return d
})

// frameReader reads what is in frames. It verifies each of them.
type frameReader struct {
	// Constant.
	file string
	src  io.Reader
	hash hash.Hash    // of what was read
	tail func() error // reads what is after the end of the frames

	copied func(frame []byte) // is passed each frame that is intact, with its header; nil: none is

	offset  int64  // in the file
	buf     []byte // compressed frame
	raw     []byte // uncompressed bytes that are not used yet; a record that goes on in the next frame is moved to its beginning
	used    int    // of raw
	rawRead int64  // uncompressed bytes of all frames
	ended   bool   // the end of the frames was read, and what is after it
	body    []byte // that is in several frames
}

func newFrameReader(file string, src io.Reader) frameReader {
	return frameReader{file: file, src: src, hash: sha256.New()}
}

func (r *frameReader) damaged(reason string) error { return &DamageError{r.file, r.offset, reason} }

// read fills a buffer.
func (r *frameReader) read(p []byte) error {
	n, err := io.ReadFull(r.src, p)
	r.hash.Write(p[:n])
	switch {
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		return r.damaged("the file is cut short")
	case err != nil:
		return r.failed(err)
	}
	r.offset += int64(n)
	return nil
}

// atEnd returns nil if the file ends here.
func (r *frameReader) atEnd() error {
	if n, err := io.ReadFull(r.src, make([]byte, 1)); n != 0 {
		return r.damaged("the file is longer than it was")
	} else if !errors.Is(err, io.EOF) {
		return r.failed(err)
	}
	return nil
}

// failed is an error of the source.
func (r *frameReader) failed(err error) error {
	return orDamage(r.file, r.offset, fmt.Errorf("archive: read %s at offset %d: %w", r.file, r.offset, err))
}

// byte is the next byte, or io.EOF at the end.
func (r *frameReader) byte() (byte, error) {
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
func (r *frameReader) uvarint() (v uint64, err error) {
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
func (r *frameReader) cut(err error) error {
	if errors.Is(err, io.EOF) {
		return r.damaged("the last record is cut short")
	}
	return err
}

// bytes are the next n bytes of the records. Memory grows with what is read, and not with what a length says.
func (r *frameReader) bytes(n int) ([]byte, error) {
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
func (r *frameReader) frame() error {
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
		if err := r.tail(); err != nil {
			return err
		}
		r.ended = true
		return nil
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
	if r.copied != nil {
		r.copied(frame)
	}
	r.rawRead += int64(raw)
	return nil
}

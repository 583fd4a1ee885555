package archive

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/klauspost/compress/zstd"

	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Writer makes one archive file in memory. It is for one goroutine, and is used again with Reset.
type Writer struct {
	encoder *zstd.Encoder
	raw     []byte // of the frame that is being filled; at most frameRawMax
	out     []byte // of the file
	info    Info
	last    Link // Header.before at first
	oldest  uint64
	newest  uint64
}

// NewWriter returns a writer, which needs Reset.
func NewWriter() *Writer {
	encoder, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(frameRawMax), zstd.WithEncoderCRC(false))
	if err != nil {
		panic("archive: options of the compression: " + err.Error())
	}
	return &Writer{encoder: encoder}
}

// Reset begins a file.
func (w *Writer) Reset(h Header) {
	w.raw, w.last, w.info = w.raw[:0], h.before(), Info{Header: h}
	w.oldest, w.newest = 0, 0
	w.out = h.append(w.out[:0])
}

// ErrOrder means that a record does not follow the one before it.
var ErrOrder = errors.New("archive: a record is not in order")

// Append adds a record. The file keeps a copy of it. An error adds nothing.
func (w *Writer) Append(r *Record) error {
	if !r.follows(w.last) {
		return fmt.Errorf("%w: epoch %d of term %d after epoch %d of term %d", ErrOrder, r.Epoch, r.Term, w.last.Epoch, w.last.Term)
	}
	at, err := r.CommitTime()
	if err != nil {
		return err
	}
	if at != 0 && (w.oldest == 0 || at < w.oldest) {
		w.oldest = at
	}
	w.newest = max(w.newest, at)
	w.add(r.appendHeader(make([]byte, 0, recordHeaderMax), w.last))
	w.add(r.Body)
	w.last = r.Link()
	w.info.Count++
	return nil
}

// add adds bytes to the frames.
func (w *Writer) add(p []byte) {
	w.info.RawBytes += int64(len(p))
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

func (w *Writer) endFrame() {
	if len(w.raw) == 0 {
		return
	}
	at := len(w.out)
	w.out = w.encoder.EncodeAll(w.raw, append(w.out, make([]byte, frameHeaderSize)...))
	putFrameHeader(w.out[at:], len(w.raw))
	w.raw = w.raw[:0]
}

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

// Count is the number of records of the file so far.
func (w *Writer) Count() uint64 { return w.info.Count }

// Bytes is about the size of the file so far: what is not compressed yet counts whole.
func (w *Writer) Bytes() int64 { return int64(len(w.out) + len(w.raw)) }

// Last is the last record of the file, or what its first one has to follow.
func (w *Writer) Last() Link { return w.last }

// Newest is the latest commit time of the file in microseconds since 1970; zero without any.
func (w *Writer) Newest() uint64 { return w.newest }

// MemoryBytes is the memory of the buffers.
func (w *Writer) MemoryBytes() int64 { return int64(cap(w.out) + cap(w.raw)) }

// Finish ends a file with at least one record, and returns its bytes, which are valid until the next Reset.
func (w *Writer) Finish() (Info, []byte) {
	w.endFrame()
	w.out = append(w.out, make([]byte, frameHeaderSize)...)
	i := &w.info
	i.Last, i.Bytes = w.last, int64(len(w.out)+trailerSize)
	i.Oldest, i.Newest = fromMicroseconds(w.oldest), fromMicroseconds(w.newest)
	trailer := i.append(make([]byte, 0, trailerSize))
	w.out = append(w.out, trailer...)
	i.SHA256 = sha256.Sum256(w.out)
	w.out = append(w.out, sealTrailer(trailer, i.SHA256)[len(trailer):]...)
	return *i, w.out
}

// validBody reports whether a body is what a replay takes.
func validBody(body []byte) error {
	if len(body) == 0 {
		return nil
	}
	return batch.Validate(body)
}

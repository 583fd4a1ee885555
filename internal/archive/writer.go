package archive

import (
	"crypto/sha256"
	"errors"
	"fmt"
)

// Writer makes one archive file in memory. It is for one goroutine, and is used again with Reset.
type Writer struct {
	frameWriter
	info   Info
	last   Link // Header.before at first
	loaded bool // the last record is a bulk load
	oldest uint64
	newest uint64
}

// NewWriter returns a writer, which needs Reset.
func NewWriter() *Writer { return &Writer{frameWriter: newFrameWriter()} }

// Reset begins a file.
func (w *Writer) Reset(h Header) {
	w.reset()
	h.Loads = false // until there is one
	w.last, w.info, w.loaded = h.before(), Info{Header: h}, false
	w.oldest, w.newest = 0, 0
	w.out = h.append(w.out)
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
	w.last, w.loaded = r.Link(), r.Load
	if w.info.Count++; r.Load {
		w.info.Loads++
	}
	return nil
}

// Count is the number of records of the file so far.
func (w *Writer) Count() uint64 { return w.info.Count }

// Last is the last record of the file, or what its first one has to follow.
func (w *Writer) Last() Link { return w.last }

// EndsWithLoad reports whether the last record of the file is a bulk load. Such a file is not ended: the log has no record with which the
// next start could compare the last one of the archive.
func (w *Writer) EndsWithLoad() bool { return w.loaded }

// Newest is the latest commit time of the file in microseconds since 1970; zero without any.
func (w *Writer) Newest() uint64 { return w.newest }

// Finish ends a file with at least one record, and returns its bytes, which are valid until the next Reset.
func (w *Writer) Finish() (Info, []byte) {
	w.end()
	i := &w.info
	if i.Header.Loads = i.Loads > 0; i.Header.Loads {
		i.Header.append(w.out[:0])
	}
	i.RawBytes = w.rawBytes
	i.Last, i.Bytes = w.last, int64(len(w.out)+trailerSize)
	i.Oldest, i.Newest = fromMicroseconds(w.oldest), fromMicroseconds(w.newest)
	trailer := i.append(make([]byte, 0, trailerSize))
	w.out = append(w.out, trailer...)
	i.SHA256 = sha256.Sum256(w.out)
	w.out = append(w.out, sealTrailer(trailer, i.SHA256)[len(trailer):]...)
	return *i, w.out
}

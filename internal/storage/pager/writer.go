package pager

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// writeWindowBytes bounds one submission of a Writer, and with it how long a demand read may wait for it.
const writeWindowBytes = 256 << 10

// Writer composes pages in one window of memory, and writes the window when it is full. Pages composed in
// ascending order are written in one piece for each run. A Writer is for one goroutine; a checkpoint may
// have several.
type Writer struct {
	ck   *Checkpoint
	slab []byte
	ids  []page.ID // of the pages in slab, in order
	reqs []vfs.Request
}

// Writer returns a new writer of the checkpoint's pages. Flush it before Commit.
func (ck *Checkpoint) Writer() *Writer {
	return &Writer{ck: ck}
}

// widen makes the window larger, up to its bound, and reports whether it did. Most writers of small
// checkpoints write only a few pages.
func (w *Writer) widen() bool {
	size := w.ck.p.pageSize
	bytes := min(max(4*size, 4*len(w.slab)), max(size, writeWindowBytes))
	if bytes <= len(w.slab) {
		return false
	}
	slab := vfs.AlignedBuffer(bytes)
	copy(slab, w.slab)
	w.slab = slab
	return true
}

// Page returns the zeroed bytes of page id, which the checkpoint must have taken. The caller completes and
// seals them before it asks for the next page.
func (w *Writer) Page(id page.ID) ([]byte, error) {
	if err := w.ck.noteWritten(id); err != nil {
		return nil, err
	}
	return w.compose(id)
}

// Write writes a complete, sealed page.
func (w *Writer) Write(id page.ID, buf []byte) error {
	if h := page.ReadHeader(buf); h.ID != id || h.Checkpoint != w.ck.number {
		return fmt.Errorf("pager: page %d of checkpoint %d written as page %d of checkpoint %d",
			h.ID, h.Checkpoint, id, w.ck.number)
	}
	dst, err := w.Page(id)
	if err != nil {
		return err
	}
	copy(dst, buf)
	return nil
}

// follows reports whether page id is the neighbour after the last one.
func (w *Writer) follows(id page.ID) bool { return len(w.ids) > 0 && w.ids[len(w.ids)-1]+1 == id }

// compose is Page without noteWritten.
func (w *Writer) compose(id page.ID) ([]byte, error) {
	size := w.ck.p.pageSize
	if (len(w.ids)+1)*size > len(w.slab) && !w.widen() {
		if err := w.Flush(); err != nil {
			return nil, err
		}
	}
	w.ck.unwritten.Add(1)
	w.ids = append(w.ids, id)
	buf := w.slab[(len(w.ids)-1)*size : len(w.ids)*size]
	clear(buf)
	return buf, nil
}

// Flush writes the pages in the window.
func (w *Writer) Flush() error {
	if len(w.ids) == 0 {
		return nil
	}
	p, size := w.ck.p, w.ck.p.pageSize
	w.reqs = w.reqs[:0]
	last := page.ID(0)
	for i, id := range w.ids {
		buf := w.slab[i*size : (i+1)*size]
		if err := w.ck.checkHeader(id, buf); err != nil {
			return p.fail(err)
		}
		if n := len(w.reqs); n > 0 && w.ids[i-1]+1 == id {
			r := &w.reqs[n-1]
			r.Buf = r.Buf[:len(r.Buf)+len(buf)]
		} else {
			w.reqs = append(w.reqs, vfs.Request{Buf: buf, Offset: p.offset(id)})
		}
		last = max(last, id)
	}
	if err := p.growTo(p.offset(last + 1)); err != nil {
		return p.failed(err)
	}
	if err := p.file.WriteBatch(w.reqs); err != nil {
		return p.failed(fmt.Errorf("pager: writing pages: %w", err))
	}
	p.checkWritten(w.ids, w.slab)
	p.written.pages.Add(uint64(len(w.ids)))
	p.written.submissions.Add(uint64(len(w.reqs)))
	w.ck.unwritten.Add(-int64(len(w.ids)))
	w.ids = w.ids[:0]
	return nil
}

// The file grows in steps of a sixteenth of it, within these bounds. They are large enough that appends
// rarely change metadata, and small enough that a small store stays small.
const (
	growShare    = 16
	growPagesMin = 16
	growBytesMax = 64 << 20
)

func (p *Pager) growStep(size int64) int64 {
	step := min(max(size/growShare, growPagesMin*int64(p.pageSize)), growBytesMax)
	return step / int64(p.pageSize) * int64(p.pageSize)
}

// growTo makes the file at least need bytes long, allocated on the device, so that a full device is
// noticed here and not during a write.
func (p *Pager) growTo(need int64) error {
	p.growMu.Lock()
	defer p.growMu.Unlock()
	size := p.fileSize.Load()
	if size >= need {
		return nil
	}
	target := max(need, size+p.growStep(size))
	err := vfs.Preallocate(p.file, target)
	if errors.Is(err, vfs.ErrNoSpace) && target > need {
		target = need
		err = vfs.Preallocate(p.file, target)
	}
	if err != nil {
		return fmt.Errorf("pager: growing the file to %d bytes: %w", target, err)
	}
	p.fileSize.Store(target)
	return nil
}

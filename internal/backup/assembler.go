package backup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// assembler composes parts from pages. It compresses frames in several goroutines, hashes them in another one, and passes parts to the
// sender:
//
//	pages ──► frame ──► compressed frames, in their order ──► part, its SHA-256 ──► sender
//	         reader         up to one a processor                  sealer
//
// A part ends at a multiple of the size of parts in the data file, if a quarter of a part is in it by then. So the parts of two
// states differ only where their pages do, and the backup that follows an interrupted one finds most parts sent.
type assembler struct {
	sender     *sender
	kind       partKind
	pageSize   int
	partBytes  int64
	compressor *compressor
	workers    *workers

	// Of the goroutine that reads.
	info  Part   // of the part, but for its hash
	bytes int64  // of its frames before compression
	frame []byte // pages that are not in a frame yet; its capacity is frameBytes
	free  chan []byte

	sealing chan piece
	sealed  chan error // the result of the sealer
}

// piece is what the sealer gets: a frame that is being compressed, or the end of a part.
type piece struct {
	frame chan []byte // delivers the frame
	end   *Part       // if frame is nil
}

// finishedPart is a part in memory.
type finishedPart struct {
	pieces [][]byte // of the object
	info   Part
	kind   partKind
}

// framesAhead is how many frames of the next part wait while a part is passed to the sender.
const framesAhead = 8

func newAssembler(s *sender, kind partKind, pageSize int, o Options) *assembler {
	w := newWorkers(o)
	a := &assembler{
		sender: s, kind: kind, pageSize: pageSize, partBytes: o.PartBytes, compressor: newCompressor(w.most), workers: w,
		free: make(chan []byte, w.most+1), sealing: make(chan piece, framesAhead), sealed: make(chan error, 1),
	}
	go func() { a.sealed <- a.seal() }()
	return a
}

// room is where up to n pages can be read to, the place after those that are in the frame.
func (a *assembler) room(n int) []byte {
	if a.frame == nil {
		select {
		case a.frame = <-a.free:
		default:
			a.frame = vfs.AlignedBuffer(frameBytes)
		}
		a.frame = a.frame[:0:frameBytes]
	}
	n = min(n, (cap(a.frame)-len(a.frame))/a.pageSize)
	return a.frame[len(a.frame) : len(a.frame)+n*a.pageSize]
}

// add adds a page that is in the room, or before it. Its id is above those of the pages before it.
func (a *assembler) add(id page.ID, p []byte) {
	at := len(a.frame)
	a.frame = a.frame[:at+a.pageSize]
	if &a.frame[at] != &p[0] {
		copy(a.frame[at:], p)
	}
	if a.info.Pages++; a.info.Pages == 1 {
		a.info.First = uint64(id)
	}
	a.info.Last = uint64(id)
}

// full ends the frame if no page fits into it.
func (a *assembler) full() error {
	if len(a.frame)+a.pageSize <= cap(a.frame) {
		return nil
	}
	return a.flushFrame()
}

func (a *assembler) flushFrame() error {
	if len(a.frame) == 0 {
		return nil
	}
	content := a.frame
	a.frame = nil
	return a.addFrame(content)
}

// addFrame compresses a frame in the background. The content is the assembler's from now on.
func (a *assembler) addFrame(content []byte) error {
	done := make(chan []byte, 1)
	a.bytes += int64(len(content))
	if err := a.workers.begin(a.sender.ctx); err != nil {
		return err
	}
	go func() {
		defer a.workers.end()
		done <- a.compressor.frame(content)
		select {
		case a.free <- content:
		default:
		}
	}()
	return a.pass(piece{frame: done})
}

// pass passes a piece to the sealer.
func (a *assembler) pass(p piece) error {
	select {
	case a.sealing <- p:
		return nil
	case <-a.sender.ctx.Done():
		return context.Cause(a.sender.ctx)
	}
}

// boundary ends the part before page id, if there is a boundary between that page and the last one of the part, and enough is in it.
func (a *assembler) boundary(id page.ID) error {
	pages := uint64(a.partBytes / int64(a.pageSize))
	if a.info.Pages == 0 || uint64(id)/pages == a.info.Last/pages || a.bytes+int64(len(a.frame)) < a.partBytes/4 {
		return nil
	}
	return a.endPart()
}

func (a *assembler) endPart() error {
	if err := a.flushFrame(); err != nil {
		return err
	}
	info := a.info
	a.info, a.bytes = Part{}, 0
	return a.pass(piece{end: &info})
}

// finish ends the last part if there is one, and waits until all are passed to the sender.
func (a *assembler) finish() error {
	var err error
	if a.bytes > 0 || len(a.frame) > 0 {
		err = a.endPart()
	}
	if sealed := a.close(); err == nil {
		err = sealed
	}
	return err
}

// close ends the sealer, and the goroutines that compress.
func (a *assembler) close() error {
	close(a.sealing)
	err := <-a.sealed
	a.workers.wait()
	return err
}

// seal hashes frames in their order, names parts, and passes them to the sender, until close. After an error it only waits for the frames.
func (a *assembler) seal() (err error) {
	var part *finishedPart
	h := sha256.New()
	for p := range a.sealing {
		if part == nil {
			h.Reset()
			part = &finishedPart{kind: a.kind}
			part.add(h, partHeader(a.kind, a.pageSize))
		}
		if p.frame != nil {
			part.add(h, <-p.frame)
			continue
		}
		p.end.Bytes, p.end.SHA256 = part.info.Bytes, hex.EncodeToString(h.Sum(nil))
		part.info = *p.end
		if err == nil {
			err = a.sender.send(part)
		}
		part = nil
	}
	return err
}

func (p *finishedPart) add(h io.Writer, piece []byte) {
	_, _ = h.Write(piece) // never fails
	p.pieces = append(p.pieces, piece)
	p.info.Bytes += int64(len(piece))
}

// partContent is the content of an object, and renews the pin while it is sent.
type partContent struct {
	*finishedPart
	renew func()
}

// Open returns a reader from the beginning.
func (c *partContent) Open() (io.ReadCloser, error) {
	return &partReader{rest: c.pieces, renew: c.renew}, nil
}

// Size is the number of bytes.
func (c *partContent) Size() int64 { return c.info.Bytes }

type partReader struct {
	rest  [][]byte
	at    int // in the first piece
	renew func()
}

func (r *partReader) Read(p []byte) (int, error) {
	for len(r.rest) > 0 && r.at == len(r.rest[0]) {
		r.rest, r.at = r.rest[1:], 0
	}
	if len(r.rest) == 0 {
		return 0, io.EOF
	}
	r.renew()
	n := copy(p, r.rest[0][r.at:])
	r.at += n
	return n, nil
}

func (r *partReader) Close() error { return nil }

// alignedRun is a buffer for reading pages of this size.
func alignedRun(pageSize int) []byte { return vfs.AlignedBuffer(max(runBytes, pageSize)) }

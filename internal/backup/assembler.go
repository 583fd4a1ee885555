package backup

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"runtime"

	"github.com/klauspost/compress/zstd"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// assembler composes parts from pages. It compresses frames in several goroutines, and passes parts to the sender.
//
// A part ends at a multiple of the size of parts in the data file, if a quarter of a part is in it by then. So the parts of two
// states differ only where their pages do, and the backup that follows an interrupted one finds most parts sent.
type assembler struct {
	sender    *sender
	kind      partKind
	pageSize  int
	partBytes int64
	encoder   *zstd.Encoder
	slots     chan struct{} // one for each frame that is being compressed

	part  *openPart
	frame []byte // pages that are not in a frame yet
}

// openPart is a part whose frames are being compressed.
type openPart struct {
	header []byte
	frames []chan []byte // each delivers one frame
	info   Part
	bytes  int64 // before compression
}

// finishedPart is a part in memory.
type finishedPart struct {
	pieces [][]byte // of the object
	info   Part
	kind   partKind
}

func newAssembler(s *sender, kind partKind, pageSize int, o Options) *assembler {
	workers := cmp.Or(o.Workers, max(1, runtime.GOMAXPROCS(0)/2))
	// One goroutine for each frame, so that the same pages give the same bytes on every machine.
	encoder, _ := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(workers), zstd.WithEncoderCRC(false)) // no option is wrong
	a := &assembler{sender: s, kind: kind, pageSize: pageSize, partBytes: o.PartBytes, encoder: encoder, slots: make(chan struct{}, workers)}
	a.begin()
	return a
}

func (a *assembler) begin() {
	a.part = &openPart{header: appendPartHeader(nil, a.kind, a.pageSize)}
}

// add adds a page. Its id is above those of the pages before it.
func (a *assembler) add(id page.ID, p []byte) error {
	if a.frame == nil {
		a.frame = make([]byte, 0, frameBytes)
	}
	a.frame = append(a.frame, p...)
	info := &a.part.info
	if info.Pages++; info.Pages == 1 {
		info.First = uint64(id)
	}
	info.Last = uint64(id)
	if len(a.frame)+a.pageSize > frameBytes {
		a.flushFrame()
	}
	return nil
}

func (a *assembler) flushFrame() {
	if len(a.frame) > 0 {
		a.addFrame(a.frame)
		a.frame = nil
	}
}

// addFrame compresses a frame in the background. The content is not changed any more.
func (a *assembler) addFrame(content []byte) {
	done := make(chan []byte, 1)
	a.part.frames = append(a.part.frames, done)
	a.part.bytes += int64(len(content))
	a.slots <- struct{}{}
	go func() {
		done <- appendFrame(make([]byte, 0, frameHeader+len(content)/2), a.encoder, content)
		<-a.slots
	}()
}

// boundary ends the part at the boundary before page id, if there is one and enough is in it.
func (a *assembler) boundary(id page.ID) error {
	if int64(id)*int64(a.pageSize)%a.partBytes != 0 || a.part.bytes+int64(len(a.frame)) < a.partBytes/4 {
		return nil
	}
	return a.endPart()
}

func (a *assembler) endPart() error {
	a.flushFrame()
	part, err := a.part.seal()
	if err != nil {
		return err
	}
	part.kind = a.kind
	a.begin()
	return a.sender.send(part)
}

// finish sends what is left.
func (a *assembler) finish() error {
	if a.part.info.Pages == 0 {
		return nil
	}
	return a.endPart()
}

// abandon waits for the goroutines that compress.
func (a *assembler) abandon() {
	for _, f := range a.part.frames {
		<-f
	}
}

// seal waits for the frames, and names the part.
func (p *openPart) seal() (*finishedPart, error) {
	out := &finishedPart{pieces: [][]byte{p.header}, info: p.info, kind: partFile}
	for _, f := range p.frames {
		out.pieces = append(out.pieces, <-f)
	}
	h := sha256.New()
	for _, piece := range out.pieces {
		out.info.Bytes += int64(len(piece))
		if _, err := h.Write(piece); err != nil {
			return nil, err
		}
	}
	out.info.SHA256 = hex.EncodeToString(h.Sum(nil))
	return out, nil
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

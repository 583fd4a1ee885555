package backup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"

	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// The page table of a backup has the id and the checksum of every live page of its state, those of its bases included: what the digest is
// computed from. An incremental backup takes from the table of its base what it does not read, and a verification compares the table with the
// pages of the chain.
//
// It is in parts of kind 3, whose frames have runs of neighbouring pages in ascending order:
//
//	run
//	0       8       12       16       20
//	+-------+-------+--------+--------+- -
//	| first | count | sum    | sum    |
//	+-------+-------+--------+--------+- -
//
// A sum is the checksum in the page's header; zero for a damaged page. A run is in one frame. A part ends at a multiple of tablePages, so that the
// tables of two states differ only where their pages do.
const (
	tablePages = 1 << 20 // of a part: 4 MiB
	runHeader  = 12
	offRunSums = runHeader

	offRunCount = 8
	sumBytes    = 4
)

// tableEntry is a page in a table.
type tableEntry struct {
	id  page.ID
	sum uint32
}

// sumOf is the checksum in the header of a page.
func sumOf(p []byte) uint32 { return binary.LittleEndian.Uint32(p) }

// tableWriter makes the table of a backup, and its digest.
type tableWriter struct {
	sender     *sender
	pageSize   int
	compressor *compressor
	digest     *digest

	frame []byte // its runs so far
	run   int    // where the last run begins in the frame
	part  *finishedPart
	hash  hash.Hash
	info  Part // of the part, but for its hash
}

func newTableWriter(s *sender, pageSize int, c *compressor) *tableWriter {
	return &tableWriter{sender: s, pageSize: pageSize, compressor: c, digest: newDigest(), frame: make([]byte, 0, frameBytes), hash: sha256.New()}
}

// add adds a page, whose id is above those of the pages before it.
func (w *tableWriter) add(e tableEntry) error {
	w.digest.add(e)
	if w.info.Pages > 0 && uint64(e.id)/tablePages != w.info.Last/tablePages {
		if err := w.endPart(); err != nil {
			return err
		}
	}
	if len(w.frame)+runHeader+sumBytes > cap(w.frame) {
		w.flushFrame()
	}
	if len(w.frame) == 0 || uint64(e.id) != w.info.Last+1 {
		w.run = len(w.frame)
		w.frame = append(binary.LittleEndian.AppendUint64(w.frame, uint64(e.id)), 0, 0, 0, 0)
	}
	w.frame = binary.LittleEndian.AppendUint32(w.frame, e.sum)
	count := w.frame[w.run+offRunCount:]
	binary.LittleEndian.PutUint32(count, binary.LittleEndian.Uint32(count)+1)
	if w.info.Pages++; w.info.Pages == 1 {
		w.info.First = uint64(e.id)
	}
	w.info.Last = uint64(e.id)
	return nil
}

func (w *tableWriter) flushFrame() {
	if len(w.frame) == 0 {
		return
	}
	if w.part == nil {
		w.hash.Reset()
		w.part = &finishedPart{kind: partTable}
		w.part.add(w.hash, partHeader(partTable, w.pageSize))
	}
	w.part.add(w.hash, w.compressor.frame(w.frame))
	w.frame = w.frame[:0]
}

func (w *tableWriter) endPart() error {
	w.flushFrame()
	part := w.part
	w.info.Bytes, w.info.SHA256 = part.info.Bytes, hex.EncodeToString(w.hash.Sum(nil))
	part.info = w.info
	w.part, w.info = nil, Part{}
	return w.sender.send(part)
}

// finish ends the last part, and sets the digest of the backup.
func (w *tableWriter) finish() error {
	w.sender.job.manifest.Digest = w.digest.sum()
	if w.info.Pages == 0 {
		return nil
	}
	return w.endPart()
}

// tableReader reads the table of a backup, in ascending order of pages. One part is in memory.
type tableReader struct {
	ctx   context.Context // of the reading
	store objectstore.Store
	m     *Manifest

	next   int          // part
	part   *Part        // that is being read
	object bytes.Buffer // the part
	runs   []byte       // of the part, that have not been read
	found  Part         // what the part has so far
	last   uint64

	run   tableEntry // the next page of the run, without its sum
	left  uint32     // pages of the run
	entry tableEntry // the page that at has stopped at
	ended bool
}

// newTableReader reads the table of a backup; of none if the format of the backup has none.
func newTableReader(ctx context.Context, store objectstore.Store, m *Manifest) *tableReader {
	return &tableReader{ctx: ctx, store: store, m: m}
}

// read returns the next page. After the last one it returns false.
func (t *tableReader) read() (e tableEntry, ok bool, err error) {
	for t.left == 0 {
		if len(t.runs) == 0 {
			if ok, err := t.nextPart(); err != nil || !ok {
				return e, false, err
			}
		}
		if err := t.nextRun(); err != nil {
			return e, false, err
		}
	}
	e = tableEntry{t.run.id, binary.LittleEndian.Uint32(t.runs)}
	t.run.id, t.left, t.runs = t.run.id+1, t.left-1, t.runs[sumBytes:]
	t.found.Pages++
	t.found.Last, t.last = uint64(e.id), uint64(e.id)
	return e, true, nil
}

// at returns the page with this id, or false. Ids ascend from call to call, from 1 on.
func (t *tableReader) at(id page.ID) (e tableEntry, ok bool, err error) {
	for !t.ended && t.entry.id < id {
		if t.entry, ok, err = t.read(); err != nil {
			return e, false, err
		}
		t.ended = !ok
	}
	return t.entry, !t.ended && t.entry.id == id, nil
}

// nextPart ends a part, and reads the next one.
func (t *tableReader) nextPart() (bool, error) {
	if p := t.part; p != nil && (t.found.Pages != p.Pages || t.found.First != p.First || t.found.Last != p.Last) {
		return false, t.damaged(fmt.Sprintf("it has %d pages from %d to %d, the manifest says %d from %d to %d", t.found.Pages, t.found.First, t.found.Last, p.Pages, p.First, p.Last))
	}
	if t.next == len(t.m.Table) {
		return false, nil
	}
	t.part = &t.m.Table[t.next]
	t.next++
	t.found = Part{}
	if err := readPartObject(t.ctx, t.store, t.m, t.part, &t.object); err != nil {
		return false, err
	}
	t.runs = t.runs[:0:0]
	err := readPart(t.part.SHA256, t.object.Bytes(), partTable, t.m.State.PageSize, func(content []byte) error {
		if t.runs = append(t.runs, content...); uint64(len(t.runs))/(runHeader+sumBytes) > t.part.Pages {
			return t.damaged("it has more runs than pages")
		}
		return nil
	})
	return true, err
}

// nextRun begins a run.
func (t *tableReader) nextRun() error {
	if len(t.runs) < runHeader {
		return t.damaged("it ends in a run")
	}
	first, count := binary.LittleEndian.Uint64(t.runs), binary.LittleEndian.Uint32(t.runs[offRunCount:])
	t.runs = t.runs[offRunSums:]
	switch {
	case count == 0 || uint64(count)*sumBytes > uint64(len(t.runs)):
		return t.damaged("a run has an impossible length")
	case first <= t.last || first >= t.m.State.PageCount || uint64(count) > t.m.State.PageCount-first:
		return t.damaged(fmt.Sprintf("a run of %d pages from page %d comes after page %d of %d", count, first, t.last, t.m.State.PageCount))
	}
	t.run.id, t.left = page.ID(first), count
	if t.found.Pages == 0 {
		t.found.First = first
	}
	return nil
}

func (t *tableReader) damaged(what string) error {
	return fmt.Errorf("%w: part %s, of the page table of backup %s: %s", ErrDamaged, t.part.SHA256, t.m.ID, what)
}

// readPartObject reads a part whole. One that is missing is damage.
func readPartObject(ctx context.Context, store objectstore.Store, m *Manifest, part *Part, into *bytes.Buffer) error {
	return partError(m, part, readInto(ctx, store, partName(m.dir(), part.SHA256), part.Bytes, into))
}

// partError makes damage of an error that says that a part is missing, too short, or cannot be read.
func partError(m *Manifest, part *Part, err error) error {
	if errors.Is(err, objectstore.ErrNotFound) || errors.Is(err, objectstore.ErrShort) || errors.Is(err, objectstore.ErrUnreadable) {
		err = fmt.Errorf("%w: part %s of backup %s: %w", ErrDamaged, part.SHA256, m.ID, err)
	}
	return err
}

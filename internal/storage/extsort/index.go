package extsort

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

// The index of a run is a tree in the same file, so that memory holds a page of each level, however long the
// run is. An entry names a piece of the file: at level 0 a block, above a page of the level below. The pages are
// written between the blocks; the run knows the last one, the root.
//
//	page:   entry | entry | ...
//	entry:  key length (uvarint) | first key | offset (uvarint) | length (uvarint) | CRC-32C of the piece (4)
const (
	indexPageBytes = 16 << 10 // a page is full when it has so many bytes
	indexFanOut    = 8        // and so many entries: keys may be as long as a page
)

// piece is a part of the file, and the first key in it or below it.
type piece struct {
	first  []byte
	offset int64
	length int
	sum    uint32 // CRC-32C of its bytes
}

func appendPiece(dst []byte, p *piece) []byte {
	dst = append(binary.AppendUvarint(dst, uint64(len(p.first))), p.first...)
	dst = binary.AppendUvarint(binary.AppendUvarint(dst, uint64(p.offset)), uint64(p.length))
	return binary.LittleEndian.AppendUint32(dst, p.sum)
}

// decodePiece decodes the first entry of an index page whose checksum was right.
func decodePiece(src []byte) (p piece, rest []byte) {
	k, n := binary.Uvarint(src)
	p.first, src = src[n:n+int(k):n+int(k)], src[n+int(k):]
	offset, n := binary.Uvarint(src)
	length, m := binary.Uvarint(src[n:])
	src = src[n+m:]
	p.offset, p.length, p.sum = int64(offset), int(length), binary.LittleEndian.Uint32(src)
	return p, src[4:]
}

// indexWriter builds the index of a run.
type indexWriter struct {
	place   func(page []byte) (offset int64) // adds a page to the file
	levels  []indexPage                      // the open page of each level
	longest []int                            // page of each level
}

type indexPage struct {
	first   []byte
	buf     []byte
	entries int
}

// add adds an entry to a level, and the page that becomes full to the level above.
func (w *indexWriter) add(level int, p *piece) {
	if level == len(w.levels) {
		w.levels, w.longest = append(w.levels, indexPage{}), append(w.longest, 0)
	}
	l := &w.levels[level]
	if l.entries == 0 {
		l.first = append(l.first[:0], p.first...)
	}
	l.buf = appendPiece(l.buf, p)
	if l.entries++; l.entries >= indexFanOut && len(l.buf) >= indexPageBytes {
		w.endPage(level)
	}
}

// endPage writes the open page of a level.
func (w *indexWriter) endPage(level int) {
	full := w.write(level)
	w.add(level+1, &full)
}

func (w *indexWriter) write(level int) piece {
	l := &w.levels[level]
	p := piece{first: l.first, offset: w.place(l.buf), length: len(l.buf), sum: crc32.Checksum(l.buf, castagnoli)}
	w.longest[level] = max(w.longest[level], p.length)
	l.buf, l.entries = l.buf[:0], 0
	return p
}

// finish writes the open pages, and returns the root and the number of levels; zero without entries.
func (w *indexWriter) finish() (root piece, depth int) {
	for level := 0; level < len(w.levels)-1; level++ {
		if w.levels[level].entries > 0 {
			w.endPage(level)
		}
	}
	if depth = len(w.levels); depth > 0 {
		root = w.write(depth - 1)
		root.first = nil
	}
	return root, depth
}

// indexCursor passes over the blocks of a run. It holds a page of each level.
type indexCursor struct {
	run    *Run
	levels []openPage // level 0 first
}

type openPage struct {
	piece
	buf  []byte
	rest []byte // entries that were not passed
}

func (r *Run) index() indexCursor { return indexCursor{run: r, levels: make([]openPage, r.depth)} }

// start moves before the first block.
func (c *indexCursor) start() error {
	if len(c.levels) == 0 {
		return nil
	}
	for i := range c.levels[:len(c.levels)-1] {
		c.levels[i].rest = nil
	}
	return c.open(len(c.levels)-1, c.run.root)
}

// next is the next block; it is false at the end.
func (c *indexCursor) next() (piece, bool, error) { return c.nextOf(0) }

func (c *indexCursor) nextOf(level int) (piece, bool, error) {
	if level == len(c.levels) {
		return piece{}, false, nil
	}
	l := &c.levels[level]
	if len(l.rest) == 0 {
		p, ok, err := c.nextOf(level + 1)
		if !ok || err != nil {
			return piece{}, false, err
		}
		if err := c.open(level, p); err != nil {
			return piece{}, false, err
		}
	}
	var p piece
	p, l.rest = decodePiece(l.rest)
	return p, true, nil
}

// seek finds the last block whose first key is not greater than key, or the first block; the next one is that after it.
func (c *indexCursor) seek(key []byte) (found piece, ok bool, err error) {
	found = c.run.root
	for level := len(c.levels) - 1; level >= 0; level-- {
		if err := c.open(level, found); err != nil {
			return piece{}, false, err
		}
		l := &c.levels[level]
		for first := true; len(l.rest) > 0; first = false {
			p, rest := decodePiece(l.rest)
			if !first && bytes.Compare(p.first, key) > 0 {
				break
			}
			found, l.rest = p, rest
		}
	}
	return found, len(c.levels) > 0, nil
}

// open reads an index page, unless it is the one that the level has.
func (c *indexCursor) open(level int, p piece) error {
	l := &c.levels[level]
	if l.length == 0 || l.offset != p.offset {
		l.length = 0
		var err error
		if l.buf, err = c.run.read(l.buf, &p); err != nil {
			return err
		}
		l.offset, l.length = p.offset, p.length
	}
	l.rest = l.buf
	return nil
}

// read reads a piece of the file into buf, which may grow, and checks it.
func (r *Run) read(buf []byte, p *piece) ([]byte, error) {
	if cap(buf) < p.length {
		buf = make([]byte, p.length)
	}
	buf = buf[:p.length]
	if _, err := r.file.ReadAt(buf, p.offset); err != nil {
		return buf, err
	}
	if crc32.Checksum(buf, castagnoli) != p.sum {
		return buf, fmt.Errorf("%w: %d bytes at %d of %s", ErrDamaged, p.length, p.offset, r.file.Name())
	}
	return buf, nil
}

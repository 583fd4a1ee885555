package extsort

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/vfs"
)

// A run is a temporary file. Nothing reads it after a restart, so it has no header, is never synced, and
// its format may change with any version.
//
//	block:  entry | entry | ...
//	entry:  key length (uvarint) | value length << 1 | replaced (uvarint) | key | value, or what replaced it
//
// An entry does not cross blocks. The first key, the offset and the checksum of each block stay in memory:
// with blocks of 64 KiB that is a thousandth of the data. A chunk has the same encoding as a run, so a
// sorted chunk is written without a copy.
const (
	blockBytes  = 64 << 10
	bufferBytes = 1 << 20 // written at once
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrDamaged means that a temporary file does not read back as it was written.
var ErrDamaged = errors.New("extsort: temporary file is damaged")

// Run is a complete run. Its fields are constant.
type Run struct {
	Count    uint64 // entries
	Large    uint64 // large values, longer than Options.InlineMax, that were not replaced
	LargeKiB uint64 // whole KiB of each of them, added up

	fs           vfs.FS
	file         vfs.File
	blocks       []block
	longestBlock int // length
	tier         int // 0 for what was sorted in memory, n+1 for what was merged from runs of tier n
}

type block struct {
	first  []byte // key of its first entry
	offset int64
	length int
	sum    uint32 // CRC-32C of its bytes
}

// Split returns keys in ascending order that cut the run into pieces of so many blocks (64 KiB or one
// entry, whichever is more).
func (r *Run) Split(blocks int) (cuts [][]byte) {
	for i := blocks; i < len(r.blocks); i += blocks {
		cuts = append(cuts, r.blocks[i].first)
	}
	return cuts
}

// remove closes and removes the file.
func (r *Run) remove() error { return errors.Join(r.file.Close(), r.fs.Remove(r.file.Name())) }

// runWriter appends entries in key order.
type runWriter struct {
	run       *Run
	inlineMax int
	lastKey   []byte
	buf       []byte // blocks to be written at offset; the last one may still be open
	open      int    // where the open block begins in buf; len(buf) if there is none
	offset    int64
}

func newRunWriter(fs vfs.FS, name string, inlineMax int) (*runWriter, error) {
	f, err := fs.Open(name, vfs.Create)
	if err != nil {
		return nil, err
	}
	return &runWriter{
		run: &Run{fs: fs, file: f}, inlineMax: inlineMax, buf: make([]byte, 0, bufferBytes+blockBytes),
	}, nil
}

// add appends an entry, whose key is larger than all before.
func (w *runWriter) add(key, value []byte, replaced bool) error {
	if w.open == len(w.buf) {
		w.beginBlock(key, w.offset+int64(w.open))
	}
	w.buf = appendEntry(w.buf, key, value, replaced)
	w.lastKey = append(w.lastKey[:0], key...)
	w.count(value, replaced)
	if len(w.buf)-w.open < blockBytes {
		return nil
	}
	w.closeBlock()
	if len(w.buf) < bufferBytes {
		return nil
	}
	return w.flush()
}

// addChunk appends a chunk of sorted entries as it is. The chunk begins after all entries before.
func (w *runWriter) addChunk(c *chunk) error {
	w.closeBlock()
	if err := w.flush(); err != nil {
		return err
	}
	from := 0
	for i := range c.entries {
		key, value := c.entry(&c.entries[i])
		at := int(c.entries[i].offset)
		if i == 0 || at-from >= blockBytes {
			if i > 0 {
				w.endBlock(c.buf[from:at])
			}
			from = at
			w.beginBlock(key, w.offset+int64(at))
		}
		w.count(value, false)
		if i == len(c.entries)-1 {
			w.lastKey = append(w.lastKey[:0], key...)
		}
	}
	w.endBlock(c.buf[from:])
	if _, err := w.run.file.WriteAt(c.buf, w.offset); err != nil {
		return err
	}
	w.offset += int64(len(c.buf))
	return nil
}

func (w *runWriter) count(value []byte, replaced bool) {
	w.run.Count++
	if !replaced && len(value) > w.inlineMax {
		w.run.Large++
		w.run.LargeKiB += uint64(len(value) / 1024)
	}
}

// beginBlock starts a block at offset.
func (w *runWriter) beginBlock(first []byte, offset int64) {
	w.run.blocks = append(w.run.blocks, block{first: bytes.Clone(first), offset: offset})
}

// endBlock completes the newest block, which consists of these bytes.
func (w *runWriter) endBlock(content []byte) {
	b := &w.run.blocks[len(w.run.blocks)-1]
	b.length, b.sum = len(content), crc32.Checksum(content, castagnoli)
	w.run.longestBlock = max(w.run.longestBlock, len(content))
}

// closeBlock completes the block that is open in the buffer.
func (w *runWriter) closeBlock() {
	if w.open == len(w.buf) {
		return
	}
	w.endBlock(w.buf[w.open:])
	w.open = len(w.buf)
}

func (w *runWriter) flush() error {
	if len(w.buf) == 0 {
		return nil
	}
	if _, err := w.run.file.WriteAt(w.buf, w.offset); err != nil {
		return err
	}
	w.offset += int64(len(w.buf))
	w.buf, w.open = w.buf[:0], 0
	return nil
}

// finish completes the run.
func (w *runWriter) finish() (*Run, error) {
	w.closeBlock()
	return w.run, w.flush()
}

func appendEntry(dst, key, value []byte, replaced bool) []byte {
	n := uint64(len(value)) << 1
	if replaced {
		n |= 1
	}
	dst = binary.AppendUvarint(dst, uint64(len(key)))
	dst = binary.AppendUvarint(dst, n)
	return append(append(dst, key...), value...)
}

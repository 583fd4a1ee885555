package extsort

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	iofs "io/fs"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// A run is a temporary file. Nothing reads it after a restart, so it has no header, is never synced, and
// its format may change with any version.
//
//	block:  entry | entry | ...
//	entry:  key length (uvarint) | value length << 1 | replaced (uvarint) | key | value, or what replaced it
//
// An entry does not cross blocks. The index has the first key, the offset and the checksum of each block
// (index.go). A chunk has the same encoding as a run, so a sorted chunk is written without a copy.
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
	root         piece  // of the index
	depth        int    // levels of the index
	common       []byte // with which all keys begin
	bytes        int64  // of the file
	blocks       int
	longestBlock int // length
	longestPages int // length of the longest index page of each level, added up
	tier         int // 0 for what was sorted in memory, n+1 for what was merged from runs of tier n
}

// cursorBytes is what the buffers of a cursor take.
func (r *Run) cursorBytes() int { return r.longestBlock + r.longestPages }

// Split returns keys in ascending order that cut the run into pieces of so many blocks (64 KiB or one
// entry, whichever is more), or of twice as many, or four times, so that the keys take at most bytesMax.
func (r *Run) Split(blocks, bytesMax int) (cuts [][]byte, err error) {
	index, bytes := r.index(), 0
	err = index.start()
	for i := 0; err == nil; i++ {
		p, ok, failed := index.next()
		if err = failed; !ok {
			break
		}
		if i == 0 || i%blocks != 0 {
			continue
		}
		cuts, bytes = append(cuts, slices.Clone(p.first)), bytes+cutBytes+len(p.first)
		for ; bytes > bytesMax; blocks *= 2 {
			cuts, bytes = everySecond(cuts)
		}
	}
	return cuts, err
}

// cutBytes is what a cut takes beside its key.
const cutBytes = 24

// everySecond keeps every second cut, and returns what they take.
func everySecond(cuts [][]byte) (kept [][]byte, bytes int) {
	kept = cuts[:0]
	for i := 1; i < len(cuts); i += 2 {
		kept, bytes = append(kept, cuts[i]), bytes+cutBytes+len(cuts[i])
	}
	clear(cuts[len(kept):])
	return kept, bytes
}

// remove closes and removes the file.
func (r *Run) remove() error { return errors.Join(r.file.Close(), r.fs.Remove(r.file.Name())) }

// runWriter appends entries in key order.
type runWriter struct {
	run       *Run
	inlineMax int
	firstKey  []byte
	lastKey   []byte
	buf       []byte // blocks to be written at offset; the last one may still be open
	open      int    // where the open block begins in buf; len(buf) if there is none
	offset    int64
	index     indexWriter
	block     piece  // the newest one, without its key once it is complete
	chunk     int    // length of the chunk that is written at offset, if one is
	after     []byte // index pages that follow the chunk
}

func newRunWriter(fs vfs.FS, name string, inlineMax int) (*runWriter, error) {
	f, err := fs.Open(name, vfs.Create)
	if errors.Is(err, iofs.ErrExist) { // an earlier sort could not remove it
		if err = fs.Remove(name); err == nil {
			f, err = fs.Open(name, vfs.Create)
		}
	}
	if err != nil {
		return nil, err
	}
	w := &runWriter{run: &Run{fs: fs, file: f}, inlineMax: inlineMax, buf: make([]byte, 0, bufferBytes+blockBytes)}
	w.index.place = w.placePage
	return w, nil
}

// placePage adds an index page: to the buffer, or to what follows the chunk that is being written.
func (w *runWriter) placePage(page []byte) (offset int64) {
	if w.chunk > 0 {
		w.after = append(w.after, page...)
		return w.offset + int64(w.chunk+len(w.after)-len(page))
	}
	w.buf = append(w.buf, page...)
	w.open = len(w.buf)
	return w.offset + int64(w.open-len(page))
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
	w.chunk = len(c.buf)
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
	w.offset, w.chunk = w.offset+int64(len(c.buf)), 0
	w.buf, w.after = append(w.buf, w.after...), w.after[:0]
	w.open = len(w.buf)
	return w.flush()
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
	if w.run.blocks == 0 {
		w.firstKey = slices.Clone(first)
	}
	w.block = piece{first: append(w.block.first[:0], first...), offset: offset}
}

// endBlock completes the newest block, which consists of these bytes.
func (w *runWriter) endBlock(content []byte) {
	w.block.length, w.block.sum = len(content), crc32.Checksum(content, castagnoli)
	w.run.blocks++
	w.run.longestBlock = max(w.run.longestBlock, len(content))
	w.index.add(0, &w.block)
}

// closeBlock completes the block that is open in the buffer.
func (w *runWriter) closeBlock() {
	if w.open == len(w.buf) {
		return
	}
	content := w.buf[w.open:]
	w.open = len(w.buf)
	w.endBlock(content)
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
	ends := [2][]byte{w.firstKey, w.lastKey}
	w.run.common = w.firstKey[:keys.CommonPrefix(len(ends), func(i int) []byte { return ends[i] })]
	w.run.root, w.run.depth = w.index.finish()
	for _, n := range w.index.longest {
		w.run.longestPages += n
	}
	w.run.bytes = w.offset + int64(len(w.buf))
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

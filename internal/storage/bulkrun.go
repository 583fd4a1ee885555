package storage

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/vfs"
)

// A run is a temporary file of sorted entries on their way into the tree, without their epoch, which is not known yet. Nothing reads it
// after a restart, so that it has no header, is never synced, and may change with any version.
//
//	block:  entry | entry | ...
//	entry:  key length (uvarint) | value length << 1 | placed (uvarint) | key | value, or its reference if placed
//
// Entries do not cross blocks. The blocks' first keys, places and checksums stay in memory: with blocks of 64 KiB that is a thousandth
// of the data. What a chunk of sorted entries looks like in memory is what a run looks like, so that it is written without a copy.
const (
	runBlockBytes  = 64 << 10
	runBufferBytes = 1 << 20 // what is written at once
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errRun means that a run is not what was written a moment ago.
var errRun = errors.New("storage: temporary file of a bulk load is damaged")

// run is a complete run.
type run struct {
	fs     vfs.FS
	file   vfs.File
	blocks []runBlock
	count  uint64 // entries
	large  uint64 // values that belong into the row store and are not there yet
	work   int64  // that placing them is, as flow counts it
	block  int    // length of the longest one
	tier   int    // 0 for what was sorted in memory, n+1 for what was merged from runs of tier n
}

type runBlock struct {
	first  []byte // key of its first entry
	offset int64
	length int
	sum    uint32 // CRC-32C of its bytes
}

// remove closes and removes the file.
func (r *run) remove() error { return errors.Join(r.file.Close(), r.fs.Remove(r.file.Name())) }

// runWriter appends entries in key order.
type runWriter struct {
	run       *run
	inlineMax int
	last      []byte // key
	buf       []byte // blocks to be written at offset, the last one still open
	open      int    // where the open block begins in buf; len(buf) if there is none
	offset    int64
}

func newRunWriter(fs vfs.FS, name string, inlineMax int) (*runWriter, error) {
	f, err := fs.Open(name, vfs.Create)
	if err != nil {
		return nil, err
	}
	return &runWriter{run: &run{fs: fs, file: f}, inlineMax: inlineMax, buf: make([]byte, 0, runBufferBytes+runBlockBytes)}, nil
}

// add appends an entry, whose key is larger than all before.
func (w *runWriter) add(key, value []byte, placed bool) error {
	if w.open == len(w.buf) {
		w.begin(key, w.offset+int64(w.open))
	}
	w.buf = appendRunEntry(w.buf, key, value, placed)
	w.last = append(w.last[:0], key...)
	w.count(value, placed)
	if len(w.buf)-w.open < runBlockBytes {
		return nil
	}
	w.closeBlock()
	if len(w.buf) < runBufferBytes {
		return nil
	}
	return w.flush()
}

// begin starts a block at offset.
func (w *runWriter) begin(first []byte, offset int64) {
	w.run.blocks = append(w.run.blocks, runBlock{first: bytes.Clone(first), offset: offset})
}

func (w *runWriter) count(value []byte, placed bool) {
	w.run.count++
	if !placed && len(value) > w.inlineMax {
		w.run.large++
		w.run.work += placeWork(value)
	}
}

// placeWork is how many versions could be merged in the time that it takes to write a large value, by and large.
func placeWork(value []byte) int64 { return 1 + int64(len(value))/1024 }

// end completes the newest block, which consists of these bytes.
func (w *runWriter) end(block []byte) {
	b := &w.run.blocks[len(w.run.blocks)-1]
	b.length, b.sum = len(block), crc32.Checksum(block, castagnoli)
	w.run.block = max(w.run.block, len(block))
}

// addChunk appends a chunk of sorted entries, which begins behind all before. It is written as it is.
func (w *runWriter) addChunk(chunk []byte, entries []spoolEntry, entry func(e *spoolEntry) (key, value []byte)) error {
	w.closeBlock()
	if err := w.flush(); err != nil {
		return err
	}
	from := 0
	for i := range entries {
		key, value := entry(&entries[i])
		at := int(entries[i].at)
		if i == 0 || at-from >= runBlockBytes {
			if i > 0 {
				w.end(chunk[from:at])
			}
			from = at
			w.begin(key, w.offset+int64(at))
		}
		w.count(value, false)
		if i == len(entries)-1 {
			w.last = append(w.last[:0], key...)
		}
	}
	w.end(chunk[from:])
	if _, err := w.run.file.WriteAt(chunk, w.offset); err != nil {
		return err
	}
	w.offset += int64(len(chunk))
	return nil
}

func appendRunEntry(dst, key, value []byte, placed bool) []byte {
	n := uint64(len(value)) << 1
	if placed {
		n |= 1
	}
	dst = binary.AppendUvarint(dst, uint64(len(key)))
	dst = binary.AppendUvarint(dst, n)
	return append(append(dst, key...), value...)
}

func (w *runWriter) closeBlock() {
	if w.open == len(w.buf) {
		return
	}
	w.end(w.buf[w.open:])
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
func (w *runWriter) finish() (*run, error) {
	w.closeBlock()
	return w.run, w.flush()
}

// runCursor reads a run. Key and value live until it moves.
type runCursor struct {
	run    *run
	block  int // that buf holds, -1 for none
	buf    []byte
	rest   []byte
	key    []byte
	value  []byte
	placed bool
	valid  bool
	err    error
}

func (r *run) cursor() *runCursor { return &runCursor{run: r, block: -1} }

// next moves to the next entry; from a new cursor, to the first.
func (c *runCursor) next() bool {
	for len(c.rest) == 0 {
		if c.err != nil || c.block+1 >= len(c.run.blocks) || !c.load(c.block+1) {
			c.valid = false
			return false
		}
	}
	c.valid = c.decode()
	return c.valid
}

// seekGE moves to the first entry whose key is not less than key.
func (c *runCursor) seekGE(key []byte) {
	blocks := c.run.blocks
	i, found := slices.BinarySearchFunc(blocks, key, func(b runBlock, k []byte) int { return bytes.Compare(b.first, k) })
	if !found {
		i--
	}
	if !c.load(max(i, 0)) {
		return
	}
	for c.next() {
		if bytes.Compare(c.key, key) >= 0 {
			return
		}
	}
}

// load makes a block the current one, in front of its first entry.
func (c *runCursor) load(i int) bool {
	c.valid, c.rest = false, nil
	if c.err != nil || i >= len(c.run.blocks) {
		return false
	}
	b := &c.run.blocks[i]
	if i != c.block {
		c.buf = slices.Grow(c.buf[:0], b.length)[:b.length]
		c.block = -1
		if _, c.err = c.run.file.ReadAt(c.buf, b.offset); c.err != nil {
			return false
		}
		if crc32.Checksum(c.buf, castagnoli) != b.sum {
			c.err = fmt.Errorf("%w: block %d of %s", errRun, i, c.run.file.Name())
			return false
		}
		c.block = i
	}
	c.rest = c.buf
	return true
}

func (c *runCursor) decode() bool {
	k, n := binary.Uvarint(c.rest)
	v, m := binary.Uvarint(c.rest[n:])
	if n <= 0 || m <= 0 || uint64(len(c.rest)-n-m) < k+v>>1 {
		c.err = fmt.Errorf("%w: entry in block %d of %s", errRun, c.block, c.run.file.Name())
		return false
	}
	c.rest = c.rest[n+m:]
	c.key, c.value, c.placed = c.rest[:k:k], c.rest[k:k+v>>1:k+v>>1], v&1 != 0
	c.rest = c.rest[k+v>>1:]
	return true
}

// loadInput is what the merge of a bulk load reads: the run at the load's epoch, over the frozen generations.
type loadInput struct {
	cursor  *runCursor
	taken   bool // the cursor's entry was handed out; it lives in a block, so that the cursor moves on only when the next is asked for
	trailer keys.Trailer
	under   *memInput
	below   btree.Entry // next of under
	any     bool        // there is one
}

var _ btree.Input = (*loadInput)(nil)

func newLoadInput(r *run, epoch keys.Epoch, under *memInput) *loadInput {
	in := &loadInput{cursor: r.cursor(), trailer: keys.MakeTrailer(epoch, keys.KindSet), under: under}
	in.SeekGE(nil)
	return in
}

// SeekGE implements btree.Input.
func (in *loadInput) SeekGE(key []byte) {
	in.cursor.seekGE(key)
	in.taken = false
	in.under.SeekGE(key)
	in.any = in.under.Next(&in.below)
}

// Next implements btree.Input. The load is newer than everything beside it.
func (in *loadInput) Next(e *btree.Entry) bool {
	c := in.cursor
	if in.taken {
		c.next()
		in.taken = false
	}
	if c.valid && (!in.any || bytes.Compare(c.key, in.below.Key) <= 0) {
		e.Key, e.Value, e.Trailer, e.Large = c.key, c.value, in.trailer, c.placed
		in.taken = true
		return true
	}
	if !in.any || c.err != nil {
		return false
	}
	*e = in.below
	in.any = in.under.Next(&in.below)
	return true
}

// Err implements btree.Input.
func (in *loadInput) Err() error { return in.cursor.err }

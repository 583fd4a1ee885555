package extsort

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"slices"
)

// Cursor reads a run in key order. Key and Value are valid until it moves.
type Cursor struct {
	Key      []byte
	Value    []byte
	Replaced bool // Value is what ReplaceLarge put there
	Valid    bool // the cursor is on an entry
	Err      error

	run   *Run
	block int // the block that buf holds; -1 for none
	buf   []byte
	rest  []byte
}

// Cursor returns a cursor before the first entry. Several cursors may read one run at the same time.
func (r *Run) Cursor() *Cursor { return &Cursor{run: r, block: -1} }

// Next moves to the next entry. It returns false at the end and after an error.
func (c *Cursor) Next() bool {
	for len(c.rest) == 0 {
		if c.Err != nil || c.block+1 >= len(c.run.blocks) || !c.read(c.block+1) {
			c.Valid = false
			return false
		}
	}
	c.Valid = c.decode()
	return c.Valid
}

// SeekGE moves to the first entry whose key is not less than key.
func (c *Cursor) SeekGE(key []byte) {
	blocks := c.run.blocks
	i, found := slices.BinarySearchFunc(blocks, key, func(b block, k []byte) int { return bytes.Compare(b.first, k) })
	if !found {
		i--
	}
	if !c.read(max(i, 0)) {
		return
	}
	for c.Next() {
		if bytes.Compare(c.Key, key) >= 0 {
			return
		}
	}
}

// read makes block i the current one and puts the cursor before its first entry.
func (c *Cursor) read(i int) bool {
	c.Valid, c.rest = false, nil
	if c.Err != nil || i >= len(c.run.blocks) {
		return false
	}
	b := &c.run.blocks[i]
	if i != c.block {
		c.buf = slices.Grow(c.buf[:0], b.length)[:b.length]
		c.block = -1
		if _, c.Err = c.run.file.ReadAt(c.buf, b.offset); c.Err != nil {
			return false
		}
		if crc32.Checksum(c.buf, castagnoli) != b.sum {
			c.Err = fmt.Errorf("%w: block %d of %s", ErrDamaged, i, c.run.file.Name())
			return false
		}
		c.block = i
	}
	c.rest = c.buf
	return true
}

func (c *Cursor) decode() bool {
	k, n := binary.Uvarint(c.rest)
	v, m := binary.Uvarint(c.rest[n:])
	if n <= 0 || m <= 0 || uint64(len(c.rest)-n-m) < k+v>>1 {
		c.Err = fmt.Errorf("%w: entry in block %d of %s", ErrDamaged, c.block, c.run.file.Name())
		return false
	}
	c.rest = c.rest[n+m:]
	c.Key, c.Value, c.Replaced = c.rest[:k:k], c.rest[k:k+v>>1:k+v>>1], v&1 != 0
	c.rest = c.rest[k+v>>1:]
	return true
}

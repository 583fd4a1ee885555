package extsort

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// Cursor reads a run in key order. Key and Value are valid until it moves.
type Cursor struct {
	Key      []byte
	Value    []byte
	Replaced bool // Value is what ReplaceLarge put there
	Valid    bool // the cursor is on an entry
	Err      error

	index   indexCursor
	started bool  // the index is before the next block
	at      piece // the block that buf holds; without bytes for none
	buf     []byte
	rest    []byte
}

// Cursor returns a cursor before the first entry. Several cursors may read one run at the same time.
func (r *Run) Cursor() *Cursor { return &Cursor{index: r.index()} }

// Next moves to the next entry. It returns false at the end and after an error.
func (c *Cursor) Next() bool {
	for len(c.rest) == 0 {
		if c.Err != nil || !c.nextBlock() {
			c.Valid = false
			return false
		}
	}
	c.Valid = c.decode()
	return c.Valid
}

func (c *Cursor) nextBlock() bool {
	if !c.started {
		c.Err, c.started = c.index.start(), true
	}
	if c.Err != nil {
		return false
	}
	p, ok, err := c.index.next()
	c.Err = err
	return ok && c.read(&p)
}

// SeekGE moves to the first entry whose key is not less than key.
func (c *Cursor) SeekGE(key []byte) {
	c.Valid, c.rest = false, nil
	if c.Err != nil {
		return
	}
	p, ok, err := c.index.seek(key)
	c.Err, c.started = err, true
	if err != nil || !ok || !c.read(&p) {
		return
	}
	for c.Next() {
		if bytes.Compare(c.Key, key) >= 0 {
			return
		}
	}
}

// read makes a block the current one and puts the cursor before its first entry.
func (c *Cursor) read(p *piece) bool {
	if c.at.length == 0 || p.offset != c.at.offset {
		c.at.length = 0
		if c.buf, c.Err = c.index.run.read(c.buf, p); c.Err != nil {
			return false
		}
		c.at = piece{offset: p.offset, length: p.length}
	}
	c.rest = c.buf
	return true
}

func (c *Cursor) decode() bool {
	k, n := binary.Uvarint(c.rest)
	v, m := binary.Uvarint(c.rest[n:])
	if n <= 0 || m <= 0 || uint64(len(c.rest)-n-m) < k+v>>1 {
		c.Err = fmt.Errorf("%w: entry in the block at %d of %s", ErrDamaged, c.at.offset, c.index.run.file.Name())
		return false
	}
	c.rest = c.rest[n+m:]
	c.Key, c.Value, c.Replaced = c.rest[:k:k], c.rest[k:k+v>>1:k+v>>1], v&1 != 0
	c.rest = c.rest[k+v>>1:]
	return true
}

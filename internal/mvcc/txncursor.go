package mvcc

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
)

// TxnCursor walks a range as a transaction sees it: its snapshot, with its own writes applied. It
// may miss writes that the transaction makes after Scan. A transaction has one cursor.
type TxnCursor struct {
	txn     *Txn
	base    *Cursor
	own     []int32 // overlay entries in the range, in key order
	at      int     // how many of own the walk has passed, in its direction
	options ScanOptions
	lower   []byte
	upper   []byte
	reached []byte // last key returned
	onOwn   bool   // the current entry is the last of own that was passed
	baseOK  bool   // base is at an entry that is not returned yet
	started bool
	ended   bool
	open    bool
}

// Scan opens the transaction's cursor and closes the previous one. The range over which the cursor
// moves counts as read, gaps between keys included.
func (t *Txn) Scan(o ScanOptions) (*TxnCursor, error) {
	if !t.open {
		return nil, ErrNoTransaction
	}
	c := &t.cursor
	c.Close()
	if err := t.checkSize(); err != nil { // the ranges of the scans before count
		return nil, err
	}
	base, err := t.session.Scan(o)
	if err != nil {
		return nil, err
	}
	c.txn, c.base, c.options, c.at = t, base, o, 0
	c.own = t.own.within(o.Lower, o.Upper)
	c.reached = c.reached[:0]
	c.onOwn, c.baseOK, c.started, c.ended, c.open = false, false, false, false, true
	return c, nil
}

// Next moves to the next key, and reports whether there is one. After false, Err returns the error,
// if there was one.
func (c *TxnCursor) Next() bool {
	if !c.open || c.ended {
		return false
	}
	if !c.started || !c.onOwn {
		c.started = true
		c.baseOK = c.base.Next()
	}
	for c.at < len(c.own) {
		e := c.entry(c.at)
		key := c.txn.own.bytes(e.key)
		if c.baseOK {
			order := bytes.Compare(c.base.Key(), key)
			if c.options.Reverse {
				order = -order
			}
			if order < 0 {
				c.onOwn = false
				return c.arrive()
			}
			if order == 0 {
				c.baseOK = c.base.Next() // hidden by the transaction's own write
			}
		}
		c.at++
		if e.kind == keys.KindDelete {
			continue
		}
		c.onOwn = true
		return c.arrive()
	}
	c.onOwn = false
	if c.baseOK {
		return c.arrive()
	}
	c.ended = true
	return false
}

func (c *TxnCursor) arrive() bool {
	if c.txn.validated() {
		c.reached = append(c.reached[:0], c.Key()...)
	}
	return true
}

// entry is one of own, by its place in the direction of the walk.
func (c *TxnCursor) entry(i int) *overlayEntry {
	if c.options.Reverse {
		i = len(c.own) - 1 - i
	}
	return &c.txn.own.entries[c.own[i]]
}

// Key is the client's key, valid until the next call.
func (c *TxnCursor) Key() []byte {
	if c.onOwn {
		return c.txn.own.bytes(c.entry(c.at - 1).key)
	}
	return c.base.Key()
}

// Value is the value, valid until the next call.
func (c *TxnCursor) Value() []byte {
	if !c.onOwn {
		return c.base.Value()
	}
	if c.options.KeysOnly {
		return nil
	}
	e := c.entry(c.at - 1)
	return metadata.Value(e.kind, c.txn.own.bytes(e.value))
}

// Epoch is the epoch of the commit that wrote the value, or 0 for the transaction's own write.
func (c *TxnCursor) Epoch() keys.Epoch {
	if c.onOwn {
		return 0
	}
	return c.base.Epoch()
}

// Err is the error that ended the walk, or nil.
func (c *TxnCursor) Err() error { return c.base.Err() }

// Close ends the walk and adds the range that was read to the read set. A second Close does
// nothing.
func (c *TxnCursor) Close() {
	if !c.open {
		return
	}
	c.open, c.own = false, nil
	c.txn.await = max(c.txn.await, c.base.Await())
	if c.txn.validated() && c.started {
		c.rememberRange()
	}
	c.base.Close()
	c.options = ScanOptions{}
}

// rememberRange adds to the read set the part of the range over which the cursor has moved: all of
// it after the end of the walk, and otherwise up to and including the last key returned. The base
// may have read further, but the transaction has not seen these keys.
func (c *TxnCursor) rememberRange() {
	c.lower, c.upper = append(c.lower[:0], c.base.lower...), append(c.upper[:0], c.base.upper...)
	if !c.ended {
		if c.options.Reverse {
			c.lower = keys.Append(c.lower[:0], keys.SpaceUser, c.reached)
		} else {
			c.upper = append(keys.Append(c.upper[:0], keys.SpaceUser, c.reached), 0)
		}
	}
	c.txn.reads.addRange(c.lower, c.upper)
}

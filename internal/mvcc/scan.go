package mvcc

import (
	"cmp"
	"context"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// ScanOptions bound a scan over the client's keys.
type ScanOptions struct {
	Lower, Upper []byte // [Lower, Upper); a nil Upper means to the end
	Reverse      bool   // from the largest key down
	KeysOnly     bool   // Value stays nil, and large values are not read
	Limit        int    // entries that the caller expects to read; 0 if unknown. Next continues after it all the same

	// Context ends a scan, however many deleted keys one step has to pass; nil if nothing ends it.
	// It is checked each time the cursor enters its guard.
	Context context.Context

	// Admit is asked before a value is read, with the bytes of it and its key. Its error ends the scan. nil: all are admitted.
	Admit func(bytes int) error

	// Steps is how many keys are visited before others run; 4,096. A caller that does much with each entry wants fewer.
	Steps int
}

// Cursor walks a range of keys in a session's snapshot. A session has one cursor. It is not for
// concurrent use.
type Cursor struct {
	session      *Session
	inner        storage.Cursor
	options      ScanOptions
	lower        []byte // internal bounds
	upper        []byte
	returned     int    // entries, since Scan
	from         []byte // internal key to seek to after a pause
	value        []byte // memory of the engine, or long
	long         []byte // buffer for a value that is not in one piece
	await        keys.Epoch
	err          error
	inside       bool // the slot is in a guard
	steps        int  // since the guard was entered
	guardEntries int  // times that the guard was entered, since Scan
	ended        bool // the scan has no more entries, or failed
	open         bool
}

// Scan opens the session's cursor at its snapshot. The bounds are copied. A previous cursor of the
// session ends.
func (x *Session) Scan(o ScanOptions) (*Cursor, error) {
	c := &x.buffers.cursor
	c.Close()
	for _, bound := range [][]byte{o.Lower, o.Upper} {
		if err := x.checkBound(bound); err != nil {
			return nil, err
		}
	}
	if invariants.Enabled {
		x.assertRange(o.Lower, o.Upper)
	}
	c.session, c.options = x, o
	c.lower = keys.Append(c.lower[:0], keys.SpaceUser, o.Lower)
	if o.Upper != nil {
		c.upper = keys.Append(c.upper[:0], keys.SpaceUser, o.Upper)
	} else {
		c.upper = append(c.upper[:0], byte(keys.SpaceUser)+1)
	}
	c.from = append(c.from[:0], c.lower...)
	if o.Reverse {
		c.from = append(c.from[:0], c.upper...)
	}
	c.await, c.err, c.returned, c.guardEntries = 0, nil, 0, 0
	c.inner.Restart()
	c.inside, c.ended, c.open = false, false, true
	return c, nil
}

// checkBound refuses a bound that is longer than a key can be, plus the one byte of a bound
// directly after a key.
func (x *Session) checkBound(bound []byte) error {
	limit := x.store.options.Limits.KeyBytes
	if len(bound) <= limit+1 || x.hasBeyondLimit(bound) || bound[len(bound)-1] == 0 && x.hasBeyondLimit(bound[:len(bound)-1]) {
		return nil
	}
	return &LimitError{What: "key bytes", Limit: limit, Got: len(bound)}
}

// Next moves to the next key that has a value at the snapshot, and reports whether there is one.
// After false, Err tells why.
func (c *Cursor) Next() bool {
	if c.ended || !c.open {
		return false
	}
	if c.inside && !c.full() {
		c.step()
	} else if !c.enter() {
		return false
	}
	for {
		for ; c.inner.Valid(); c.step() {
			v := c.inner.Version()
			if v.Sync {
				c.await = max(c.await, c.session.store.mustAwait(v.Sync, v.Epoch))
			}
			if v.Kind.HasValue() {
				c.returned++
				if invariants.Enabled {
					c.session.assertRead(keys.User(c.inner.Key()))
				}
				return c.load()
			}
			if c.full() {
				break
			}
		}
		if !c.inner.Valid() && !c.inner.Paused() {
			c.ended, c.err = true, c.inner.Err()
			return false
		}
		if !c.enter() {
			return false
		}
	}
}

// stepsPerGuard is how many keys a scan visits before it leaves its guard for a moment: some tenths
// of a millisecond if all of them are in memtables, which cannot be freed meanwhile. The cost of a
// few seeks for so many steps cannot be measured.
const stepsPerGuard = 4096

// full reports whether the cursor has done enough inside one guard.
func (c *Cursor) full() bool {
	return c.inner.Full() || c.steps >= cmp.Or(c.options.Steps, stepsPerGuard)
}

// enter enters a guard, after leaving the one that it is in, and positions on the first key not yet
// returned or passed. It reports false, and ends the scan, if the scan's context has ended.
func (c *Cursor) enter() bool {
	if c.inside {
		c.Pause()
	}
	if c.guardEntries > 0 { // also after a page: a client may take pages without end
		letOthersRun()
	}
	if ctx := c.options.Context; ctx != nil && ctx.Err() != nil {
		c.ended, c.err = true, context.Cause(ctx)
		return false
	}
	s := c.session
	s.slot.Enter()
	c.inside, c.steps = true, 0
	c.guardEntries++
	s.reader.OpenCursor(&c.inner, s.at, c.lower, c.upper, max(c.options.Limit-c.returned, 0))
	if c.options.Reverse {
		c.inner.SeekLT(c.from)
	} else {
		c.inner.SeekGE(c.from)
	}
	return true
}

func (c *Cursor) step() {
	c.steps++
	if c.options.Reverse {
		c.inner.Prev()
	} else {
		c.inner.Next()
	}
}

// load reads the value of the current key. Only Pause copies the key; until then it is in memory of
// the engine.
func (c *Cursor) load() bool {
	if c.options.KeysOnly {
		c.value = nil
		return true
	}
	v := c.inner.Version()
	if admit := c.options.Admit; admit != nil {
		if c.err = admit(len(c.inner.Key()) + v.Size()); c.err != nil {
			c.ended = true
			return false
		}
	}
	if c.value = v.Inline(); c.value != nil {
		return true
	}
	if c.long, c.err = c.session.reader.AppendScanned(c.long[:0], *v); c.err == nil {
		c.value = c.long
	} else {
		c.ended, c.err = true, ofKey(c.err, c.inner.Key())
	}
	return c.err == nil
}

// Key is the client's key. It is valid until the next call of Next, Pause or Close.
func (c *Cursor) Key() []byte { return keys.User(c.inner.Key()) }

// Value is the key's value, empty with KeysOnly. It is valid as long as Key.
func (c *Cursor) Value() []byte { return c.value }

// Epoch is the commit that wrote the value.
func (c *Cursor) Epoch() keys.Epoch { return c.inner.Version().Epoch }

// Await is the newest epoch that must be durable before the client may see what was returned since
// the last call; zero if none.
func (c *Cursor) Await() keys.Epoch {
	e := c.await
	c.await = 0
	return e
}

// Err is what ended the scan early, or nil.
func (c *Cursor) Err() error { return c.err }

// Pause leaves the guard while the caller blocks, so that a slow reader keeps only the versions of
// its snapshot from reclamation, and no large value. Key and Value become invalid; Next continues after them.
func (c *Cursor) Pause() {
	if cap(c.long) > pausedBytesMax {
		c.long, c.value = nil, nil
	}
	if !c.inside {
		return
	}
	switch {
	case c.inner.Paused():
		c.from = append(c.from[:0], c.inner.Resume()...)
	case !c.inner.Valid():
	case c.options.Reverse:
		c.from = append(c.from[:0], c.inner.Key()...)
	default:
		c.from = append(append(c.from[:0], c.inner.Key()...), 0) // the smallest key after it
	}
	c.inner.Close()
	c.inside = false
	c.session.slot.Leave()
}

// Close ends the scan. Closing twice is harmless.
func (c *Cursor) Close() {
	if !c.open {
		return
	}
	c.Pause()
	c.open = false
	c.options = ScanOptions{} // which refers to the request, and to its connection
}

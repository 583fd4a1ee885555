package mvcc

import (
	"epochkv/internal/storage"
	"epochkv/internal/storage/keys"
)

// ScanOptions bound a scan over the client's keys.
type ScanOptions struct {
	Lower, Upper []byte // [Lower, Upper); a nil Upper means to the end
	Reverse      bool   // from the largest key down
	KeysOnly     bool   // Value stays nil, and large values are not read
	Limit        int    // entries that the caller will look at; 0 if it cannot tell. Next goes on behind it all the same
}

// Cursor walks a range of keys in a session's view. It belongs to its session, which has one; it is not for concurrent use.
type Cursor struct {
	session  *Session
	inner    storage.Cursor
	options  ScanOptions
	lower    []byte // internal bounds
	upper    []byte
	returned int    // entries, since Scan
	last     []byte // internal key last returned, to go on from after a pause
	value    []byte // lies in the engine, or in long
	long     []byte // a value that had to be put together
	await    keys.Epoch
	err      error
	started  bool
	inside   bool // physical protection is held and inner is positioned on last
	ended    bool // there is nothing more
	open     bool
}

// Scan opens the session's cursor in its view. The bounds are copied. A previous cursor of the session ends.
func (x *Session) Scan(o ScanOptions) (*Cursor, error) {
	c := &x.cursor
	c.Close()
	if len(o.Lower) > x.store.limits.KeyBytes+1 || len(o.Upper) > x.store.limits.KeyBytes+1 {
		return nil, &LimitError{What: "key bytes", Limit: x.store.limits.KeyBytes, Got: max(len(o.Lower), len(o.Upper))}
	}
	c.session, c.options = x, o
	c.lower = keys.Append(c.lower[:0], keys.SpaceUser, o.Lower)
	if o.Upper != nil {
		c.upper = keys.Append(c.upper[:0], keys.SpaceUser, o.Upper)
	} else {
		c.upper = append(c.upper[:0], byte(keys.SpaceUser)+1)
	}
	c.last, c.await, c.err, c.returned = c.last[:0], 0, nil, 0
	c.inner.Restart()
	c.started, c.inside, c.ended, c.open = false, false, false, true
	return c, nil
}

// Next moves to the next key that has a value in the view, and reports whether there is one. After false, Err tells why.
func (c *Cursor) Next() bool {
	if c.ended || !c.open {
		return false
	}
	switch {
	case !c.inside:
		c.enter()
	case c.inner.Leaves() >= leavesInside:
		c.Pause()
		c.enter()
	default:
		c.step()
	}
	for ; c.inner.Valid(); c.step() {
		v := c.inner.Version()
		if v.Sync {
			c.await = max(c.await, c.session.store.mustAwait(v.Sync, v.Epoch))
		}
		if v.Kind != keys.KindSet {
			continue
		}
		c.returned++
		return c.load()
	}
	c.ended, c.err = true, c.inner.Err()
	return false
}

// leavesInside is how many leaves a scan visits before it gives up its protection for a moment. Until then no frame is used again that was
// evicted since it began: a scan of more than the cache in one go read nine pages in ten past the cache, and so did others meanwhile.
const leavesInside = 16

// enter takes physical protection and positions on the first key not yet returned.
func (c *Cursor) enter() {
	s := c.session
	s.slot.Enter()
	c.inside = true
	s.reader.OpenCursor(&c.inner, s.at, c.lower, c.upper, max(c.options.Limit-c.returned, 0))
	switch {
	case !c.started && !c.options.Reverse:
		c.inner.SeekGE(c.lower)
	case !c.started:
		c.inner.SeekLT(c.upper)
	case !c.options.Reverse:
		c.last = append(c.last, 0) // the smallest key behind last
		c.inner.SeekGE(c.last)
	default:
		c.inner.SeekLT(c.last)
	}
	c.started = true
}

func (c *Cursor) step() {
	if c.options.Reverse {
		c.inner.Prev()
	} else {
		c.inner.Next()
	}
}

// load takes the value of the current key. The key is copied only by Pause; until then it lies in the engine.
func (c *Cursor) load() bool {
	if c.options.KeysOnly {
		c.value = nil
		return true
	}
	v := c.inner.Version()
	if c.value = v.Inline(); c.value != nil {
		return true
	}
	c.value, c.err = c.session.reader.Value(&c.long, *v)
	if c.err != nil {
		c.ended, c.err = true, ofKey(c.err, c.inner.Key())
	}
	return c.err == nil
}

// Key is the client's key. It lives until the next call of Next, Pause or Close.
func (c *Cursor) Key() []byte { return keys.User(c.inner.Key()) }

// Value is the key's value, empty with KeysOnly. It lives as long as Key.
func (c *Cursor) Value() []byte { return c.value }

// Epoch is the commit that wrote the value.
func (c *Cursor) Epoch() keys.Epoch { return c.inner.Version().Epoch }

// Await is the newest epoch that must be durable before what was returned since the last call may be shown; zero if none.
func (c *Cursor) Await() keys.Epoch {
	e := c.await
	c.await = 0
	return e
}

// Err is what ended the scan early, or nil.
func (c *Cursor) Err() error { return c.err }

// Pause gives up the physical protection while the caller blocks, so that a slow reader holds no memory but its snapshot.
// Key and Value become invalid; Next goes on behind them.
func (c *Cursor) Pause() {
	if !c.inside {
		return
	}
	if c.inner.Valid() {
		c.last = append(c.last[:0], c.inner.Key()...)
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
}

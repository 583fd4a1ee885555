package pin

import "sync/atomic"

// Counter counts what one owner does, for collectors to sum. Adding writes the owner's own line and nothing shared. It is not for
// concurrent adding.
type Counter struct {
	_    [cacheLinePair]byte
	word atomic.Uint64
	_    [cacheLinePair - 8]byte
}

// Add counts n more.
func (c *Counter) Add(n uint64) { c.word.Store(c.word.Load() + n) }

// Count is what was added so far.
func (c *Counter) Count() uint64 { return c.word.Load() }

package pin

import "sync/atomic"

// Counter counts what one owner does, for collectors to sum. Adding writes the owner's own line and nothing shared, at the price of a plain
// store where the processor allows it (storeWord): who counts each hit of a page cache has no time for a locked instruction. It is not for
// concurrent adding.
type Counter struct {
	_    [cacheLinePair]byte
	word atomic.Uint64
	_    [cacheLinePair - 8]byte
}

// Add counts n more.
func (c *Counter) Add(n uint64) { storeWord(&c.word, c.word.Load()+n) }

// Count is what was added so far.
func (c *Counter) Count() uint64 { return c.word.Load() }

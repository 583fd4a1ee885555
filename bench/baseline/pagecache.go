// Package baseline holds small implementations of the techniques that EpochKV's parts are compared with. Production code has none of them.
package baseline

import (
	"sync"
	"sync/atomic"
)

// Policy chooses which page a PageCache evicts.
type Policy uint8

// The policies.
const (
	LRU   Policy = iota // exactly the least recently used page; every hit takes a lock and moves the page within a list
	Clock               // one reference bit for each page; a hit takes a shared lock, and sets the bit if it is not set
)

// PageCache is a page cache of a fixed number of frames: a map and a lock, as textbooks have it. It is safe for concurrent use. A page's bytes
// are valid until the page is evicted, so that concurrent readers must not read more pages than fit.
type PageCache struct {
	policy   Policy
	pageSize int
	load     func(id uint64, page []byte)

	mu     sync.RWMutex // guards all below, but for the bits
	frames map[uint64]int32
	ids    []uint64
	memory []byte
	hand   int           // Clock: the next frame to look at
	bits   []atomic.Bool // Clock: visited since the hand came by
	prev   []int32       // LRU: by frame, 1 up; 0 is the list's head: next is the newest frame, prev the oldest
	next   []int32
}

// NewPageCache makes a cache of so many pages, all of whose memory is there from the beginning.
func NewPageCache(policy Policy, frames, pageSize int, load func(id uint64, page []byte)) *PageCache {
	return &PageCache{
		policy: policy, pageSize: pageSize, load: load,
		frames: make(map[uint64]int32, frames), ids: make([]uint64, 0, frames), memory: make([]byte, frames*pageSize),
		bits: make([]atomic.Bool, frames), prev: make([]int32, frames+1), next: make([]int32, frames+1),
	}
}

// Visit returns page id, from memory or loaded.
func (c *PageCache) Visit(id uint64) []byte {
	if c.policy == Clock {
		c.mu.RLock()
		f, ok := c.frames[id]
		if ok && !c.bits[f].Load() {
			c.bits[f].Store(true)
		}
		c.mu.RUnlock()
		if ok {
			return c.page(f)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	f, ok := c.frames[id]
	if !ok {
		return c.missLocked(id)
	}
	if c.policy == LRU {
		c.unlink(f + 1)
		c.link(f + 1)
	}
	return c.page(f)
}

func (c *PageCache) page(f int32) []byte {
	at := int(f) * c.pageSize
	return c.memory[at : at+c.pageSize : at+c.pageSize]
}

func (c *PageCache) missLocked(id uint64) []byte {
	f := int32(len(c.ids))
	if len(c.ids) < cap(c.ids) {
		c.ids = append(c.ids, id)
	} else {
		f = c.victimLocked()
		delete(c.frames, c.ids[f])
		c.ids[f] = id
	}
	c.frames[id] = f
	c.bits[f].Store(true)
	c.link(f + 1)
	c.load(id, c.page(f))
	return c.page(f)
}

// victimLocked takes a frame off the list.
func (c *PageCache) victimLocked() int32 {
	f := c.prev[0] - 1
	if c.policy == Clock {
		for c.bits[c.hand].Swap(false) {
			c.hand = (c.hand + 1) % len(c.ids)
		}
		f = int32(c.hand)
		c.hand = (c.hand + 1) % len(c.ids)
	}
	c.unlink(f + 1)
	return f
}

func (c *PageCache) link(n int32) {
	c.prev[n], c.next[n] = 0, c.next[0]
	c.prev[c.next[0]], c.next[0] = n, n
}

func (c *PageCache) unlink(n int32) {
	c.next[c.prev[n]], c.prev[c.next[n]] = c.next[n], c.prev[n]
}

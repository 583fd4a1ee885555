// Package cache keeps pages of the data file in memory, by id. It knows ids and bytes, but neither
// trees nor files: the owner of the cache says how a page is read and verified (Config.Read).
//
//	frame          the memory of one cached page: PageSize bytes outside the Go heap, in one mapping
//	usage count    a word per frame: accesses increment it, the clock hand decrements it
//	hint           the cap of a page's usage count; each access gives one
//	retired frame  an evicted frame that a reader may still use
//	flight         one page that is being read; other misses of the page wait for it
//
//	Page ─► table: id -> frame ─ found ─► count at its cap? ─► bytes  (no lock, no store)
//	              │ not found                   └─ no: one step up, a CAS on the frame's own word
//	              ▼
//	        mutex: flight? ─► wait        else: a free frame ─► read, unlocked ─► table ─► bytes
//	                                             ▲
//	        resident ─ hand ─► retired ─ readers have left ─► free
//
// Readers hold no pins. A reader is inside the guard of its pin.Slot from before the look-up until
// it is done with the bytes. An evicted frame first leaves the table and is then retired. It is
// reused only when no slot holds the reclamation tick of the retirement or an older one. So a
// reader cannot reuse a frame that it has itself caused to be evicted. Therefore the cache keeps a
// few frames evicted ahead of need, and more after a shortage. If no frame is left, because a reader stays
// inside its guard for long or because a batch is larger than the cache, the page is read into the
// Go heap instead. There it stays valid for the readers that have it, and it is not cached. No read
// waits for a frame, so no read can hang for want of one.
//
// Invariants: a frame is absent, free, reading, resident or retired, and each of these states has
// one list or mark (reclaim.go). The table names resident frames only. The bytes of resident and
// retired frames never change. A page that could not be read is never cached, nor a page that was
// invalidated while it was read.
package cache

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/epochkv/epochkv/internal/pin"
)

// ID names a page. Zero names no page. Zero and ids of more than 40 bits are read but not cached.
type ID uint64

// Read is one page of a batch. The callback ReadBatch fills Buf with the verified page, or sets Err.
type Read struct {
	ID  ID
	Buf []byte
	Err error
}

// Config has what a cache needs. Read and ReadBatch are called without locks held, concurrently,
// and never for one page twice at the same time.
type Config struct {
	Bytes    int64 // of frames; tables and usage counts add about half a percent
	PageSize int
	Registry *pin.Registry
	// Read reads and verifies one page.
	Read func(id ID, buf []byte) error
	// ReadBatch does the same for several pages in one submission, and sets the Err of each read.
	ReadBatch func(reads []Read)
}

// framesMin is the size of the smallest cache: enough for a descent, and a few frames evicted
// ahead.
const framesMin = 16

// ErrSize is wrapped when the requested size of a cache is below framesMin frames or above its
// address space.
var ErrSize = errors.New("cache: impossible size")

// Cache is safe for concurrent use.
type Cache struct {
	// Constant after New, except table, which Resize replaces. The hit path reads these fields and
	// no others of Cache.
	table    atomic.Pointer[table]
	words    unsafe.Pointer // usage count of frame f
	frames   unsafe.Pointer // frame f
	pageSize int
	clock    *clock

	// Constant after New.
	config    Config
	framesMax uint32 // frames that fit into the address space
	frameMem  backing
	wordMem   backing

	_  [2 * lineBytes]byte
	mu sync.Mutex // guards all fields below; registry locks are taken inside it
	pool
	flights  map[ID]*flight
	pooled   []*flight // pooled flights without waiters, for reuse
	history  history
	counters counters
}

// New makes a cache. Close frees its memory.
func New(config Config) (*Cache, error) {
	c := &Cache{config: config, pageSize: config.PageSize, flights: make(map[ID]*flight)}
	n, err := c.framesFor(config.Bytes, framesMax)
	if err != nil {
		return nil, err
	}
	if err := c.reserveFrames(reservation(config.Bytes)); err != nil {
		// Some machines count address space as memory. There the cache can shrink, and grow again
		// up to its first size.
		if err := c.reserveFrames(config.Bytes); err != nil {
			return nil, err
		}
	}
	if c.wordMem, err = reserve(int64(c.framesMax+1) * usageBytes &^ 7); err != nil {
		return nil, errors.Join(fmt.Errorf("cache: reserve memory for usage counts: %w", err), c.frameMem.release())
	}
	c.words = c.wordMem.base
	c.clock = &clock{words: c.words}
	if err := c.resizeLocked(n); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func (c *Cache) reserveFrames(bytes int64) (err error) {
	if c.frameMem, err = reserve(bytes); err != nil {
		return fmt.Errorf("cache: reserve %d bytes for frames: %w", bytes, err)
	}
	c.frames = c.frameMem.base
	c.framesMax = uint32(min(framesMax, bytes/int64(c.pageSize)))
	return nil
}

// Close frees all memory. No goroutine may use the cache or bytes from it any more.
func (c *Cache) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := []error{c.frameMem.release(), c.wordMem.release()}
	if t := c.table.Swap(nil); t != nil {
		errs = append(errs, t.mem.release())
	}
	for _, r := range c.oldTables {
		errs = append(errs, r.table.mem.release())
	}
	return errors.Join(errs...)
}

// Visitor is a reader's own state of its visits. Only its owner uses it.
type Visitor struct {
	Hits pin.Counter // pages that were in memory

	// NoWait makes visits fail with ErrWouldWait where they would wait for a page to be read.
	NoWait bool

	// What the visits have waited for, until the owner takes it.
	Reads    uint64 // pages that were not in memory
	ReadTime time.Duration
}

// TakeReads returns the reads since the last call, and begins anew.
func (v *Visitor) TakeReads() (pages uint64, took time.Duration) {
	pages, took = v.Reads, v.ReadTime
	v.Reads, v.ReadTime = 0, 0
	return pages, took
}

// read is a miss whose duration the visitor notes.
func (v *Visitor) read(c *Cache, id ID, h Hint) ([]byte, error) {
	start := time.Now()
	p, err := c.miss(id, h)
	v.Reads++
	v.ReadTime += time.Since(start)
	return p, err
}

// ErrWouldWait is the error of a visit without waiting to a page that is not in memory.
var ErrWouldWait = errors.New("cache: the page is not in memory")

// Visit returns page id. The caller is inside its slot's guard, and the bytes are valid and
// constant until it leaves. A cursor calls Visit once for a page, however many entries it reads
// there. An error comes from Config.Read, and nothing is cached then, or is ErrWouldWait.
func (c *Cache) Visit(id ID, h Hint, v *Visitor) ([]byte, error) {
	if f, ok := c.table.Load().lookup(id); ok {
		if wordAt(c.words, f).Load() < usageCaps[h] { // this is touch, which is too large to be inlined
			c.clock.increment(f, usageCaps[h])
		}
		v.Hits.Add(1)
		return c.frame(f), nil
	}
	if v.NoWait {
		return nil, ErrWouldWait
	}
	return v.read(c, id, h)
}

// Page is Visit for callers whose hits are not counted.
func (c *Cache) Page(id ID, h Hint) ([]byte, error) {
	var v Visitor
	return c.Visit(id, h, &v)
}

// Contains reports whether Page would find id in memory. It does not increment the usage count. The
// caller is inside its slot's guard.
func (c *Cache) Contains(id ID) bool {
	_, ok := c.table.Load().lookup(id)
	return ok
}

func (c *Cache) frame(f uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Add(c.frames, uintptr(f)*uintptr(c.pageSize))), c.pageSize)
}

// touch is a visit to a resident page: it increments the usage count by one. If the count is at the
// cap of the hint, touch stores nothing.
func (c *Cache) touch(f uint32, h Hint) {
	if wordAt(c.words, f).Load() < usageCaps[h] {
		c.clock.increment(f, usageCaps[h])
	}
}

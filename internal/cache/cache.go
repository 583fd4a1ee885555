// Package cache keeps pages of the data file in memory, by id. It knows ids and bytes, neither trees nor files: what a page is,
// and how it is read and verified, its owner says (Config.Load).
//
//	frame     a page's place: PageSize bytes outside the Go heap, in one mapping
//	warmth    a word per frame that says how much its page has been wanted (clock.go)
//	hint      how warm a page may become; given with every access
//	limbo     where a frame waits between eviction and reuse
//	flight    one page being read; whoever else misses it meanwhile waits for the same read
//
//	Page ─► table: id -> frame ─ found ─► warm enough? ─► bytes            (no lock; a warm page writes nothing)
//	              │ not found                   └─ no: one step, a CAS on the frame's own word
//	              ▼
//	        mutex: flight? ─► wait        else: a free frame ─► read, unlocked ─► table ─► bytes
//	                                             ▲
//	        resident ─ hand ─► limbo ─ readers have moved on ─► free
//
// Readers hold no pins. They are inside their pin.Slot from before the look-up until they are done with the bytes. An evicted frame
// leaves the table first and is retired then; it is reused only when no slot is older than that. So a reader may not reuse what it has
// itself caused to be evicted: a few frames are therefore kept evicted ahead of need, more after a shortage. If none is left, because
// a reader stays inside its slot for long or a batch is larger than the cache, the page is read into the Go heap instead,
// where it stays valid for whoever has it, and is not cached. Nobody waits until there is a frame, so nothing can hang on one.
//
// Invariants: a frame is absent, free, loading, resident or in limbo, and of each there is one list or mark (reclaim.go). The table
// names resident frames only. Bytes of resident and limbo frames never change. A page that failed to load is never cached, nor
// one that was forgotten while it was read.
package cache

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/epochkv/epochkv/internal/pin"
)

// ID names a page. 0 is none, and at most 40 bits count: other ids are loaded but not cached.
type ID uint64

// Read is one page of a batch. Load callbacks fill Buf with the verified page, or set Err.
type Read struct {
	ID  ID
	Buf []byte
	Err error
}

// Config is what a cache needs. Load and LoadBatch are called without locks held, concurrently, and never twice at a time for one page.
type Config struct {
	Bytes    int64 // of frames; tables and words add about half a percent
	PageSize int
	Registry *pin.Registry
	// Load reads and verifies one page.
	Load func(id ID, buf []byte) error
	// LoadBatch does so for several in one submission, and sets each read's Err.
	LoadBatch func(reads []Read)
}

// framesMin is the smallest cache: a descent, and a few frames evicted ahead.
const framesMin = 16

// ErrSize is wrapped when a cache is to be smaller than framesMin frames or larger than its address space.
var ErrSize = errors.New("cache: impossible size")

// Cache is safe for concurrent use.
type Cache struct {
	// Constant after New, but for table, which Resize replaces. The hit path reads these and nothing else of Cache.
	table    atomic.Pointer[table]
	words    unsafe.Pointer // warmth word f
	frames   unsafe.Pointer // frame f
	pageSize int
	clock    *clock

	// Constant after New.
	config    Config
	framesMax uint32 // that fit the address space
	frameMem  backing
	wordMem   backing

	_  [2 * lineBytes]byte
	mu sync.Mutex // guards all below; registry locks are inside
	pool
	flights  map[ID]*flight
	spare    []*flight // without waiters, for reuse
	history  history
	counters counters
}

// New makes a cache. Close gives its memory back.
func New(config Config) (*Cache, error) {
	c := &Cache{config: config, pageSize: config.PageSize, flights: make(map[ID]*flight)}
	n, err := c.framesFor(config.Bytes, framesMax)
	if err != nil {
		return nil, err
	}
	if err := c.reserveFrames(reservation(config.Bytes)); err != nil {
		// Some machines count address space as memory. Such a cache can shrink, and grow back to what it was.
		if err := c.reserveFrames(config.Bytes); err != nil {
			return nil, err
		}
	}
	if c.wordMem, err = reserve(int64(c.framesMax+1) * warmthBytes &^ 7); err != nil {
		return nil, errors.Join(fmt.Errorf("cache: reserve warmth words: %w", err), c.frameMem.release())
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

// Close gives all memory back. Nobody may be using the cache or bytes from it.
func (c *Cache) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	errs := []error{c.frameMem.release(), c.wordMem.release()}
	if t := c.table.Load(); t != nil {
		errs = append(errs, t.mem.release())
	}
	for _, r := range c.oldTables {
		errs = append(errs, r.table.mem.release())
	}
	return errors.Join(errs...)
}

// Visit returns page id. The caller is inside its slot's protection, and the bytes are valid and constant until it leaves. A cursor calls it
// once however many entries it reads there. An error is Load's; nothing is cached then. What was in memory counts as a hit with the
// caller, in the caller's own memory.
func (c *Cache) Visit(id ID, h Hint, hits *pin.Counter) ([]byte, error) {
	if f, ok := c.table.Load().lookup(id); ok {
		if wordAt(c.words, f).Load() < ceilings[h] { // touch, which is too large to be inlined
			c.clock.climb(f, ceilings[h])
		}
		hits.Add(1)
		return c.frame(f), nil
	}
	return c.miss(id, h)
}

// Page is Visit for those whose hits nobody counts.
func (c *Cache) Page(id ID, h Hint) ([]byte, error) {
	var hits pin.Counter
	return c.Visit(id, h, &hits)
}

// Contains reports whether Page would find id in memory. It does not warm. The caller is inside its slot's protection.
func (c *Cache) Contains(id ID) bool {
	_, ok := c.table.Load().lookup(id)
	return ok
}

func (c *Cache) frame(f uint32) []byte {
	return unsafe.Slice((*byte)(unsafe.Add(c.frames, uintptr(f)*uintptr(c.pageSize))), c.pageSize)
}

// touch is a visit to a resident page: a step up, unless it is warm enough, and then no store at all.
func (c *Cache) touch(f uint32, h Hint) {
	if wordAt(c.words, f).Load() < ceilings[h] {
		c.clock.climb(f, ceilings[h])
	}
}

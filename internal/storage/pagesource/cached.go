package pagesource

import (
	"sync"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// Cached is the page cache of a data file. There is one for each engine. It has two steps of construction: the pager
// needs Invalidate when it opens the file, and Open needs the pager.
type Cached struct {
	// Constant after Open.
	pager *pager.Reader
	cache *cache.Cache

	batchReads, batchPages atomic.Uint64 // submissions of several pages, and the pages in them

	mu      sync.Mutex // a leaf: nothing else is locked while it is held
	readers []*Reader  // all that were made, for their counts
}

// Open creates a cache of so many bytes over the pages of p.
func (c *Cached) Open(p *pager.Reader, bytes int64, registry *pin.Registry) (err error) {
	c.pager = p
	c.cache, err = cache.New(cache.Config{
		Bytes: bytes, PageSize: p.PageSize(), Registry: registry, Read: c.read, ReadBatch: c.readBatch,
	})
	return err
}

// Close frees the memory of the cache. Nothing may use it any more.
func (c *Cached) Close() error {
	if c.cache == nil { // Open failed, or was not called
		return nil
	}
	return c.cache.Close()
}

// Resize changes the size of the cache while readers use it.
func (c *Cached) Resize(bytes int64) error { return c.cache.Resize(bytes) }

// Revoke removes a page from the cache that an aborted checkpoint wrote. The page that it was to replace is as hot as before.
func (c *Cached) Revoke(id page.ID) {
	if c.cache != nil { // the file is being opened
		c.cache.Revoke(cache.ID(id))
	}
}

// Invalidate removes a page from the cache. The pager calls it before the page's id is allocated again.
func (c *Cached) Invalidate(id page.ID) {
	if c.cache != nil { // the file is being opened
		c.cache.Invalidate(cache.ID(id))
	}
}

// Stats describes the cache and the reads through it.
type Stats struct {
	cache.Stats

	Hits       uint64 // pages that readers found in memory
	BatchReads uint64 // submissions of several pages to the device
	BatchPages uint64 // pages in them
}

// Stats reads the counters.
func (c *Cached) Stats() Stats {
	return Stats{Stats: c.cache.Stats(), Hits: c.hits(), BatchReads: c.batchReads.Load(), BatchPages: c.batchPages.Load()}
}

// hits is how many pages all readers found in memory.
func (c *Cached) hits() (n uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.readers {
		n += r.visitor.Hits.Count()
	}
	return n
}

// hintFor is the hint of a point read. An inner node serves hundreds of leaves.
func hintFor(level int) cache.Hint {
	if level > 0 {
		return cache.VeryHigh
	}
	return cache.Default
}

// Page implements btree.Source. The bytes are valid until the caller leaves the guard of its slot.
func (c *Cached) Page(id page.ID, level int) ([]byte, error) {
	return c.cache.Page(cache.ID(id), hintFor(level))
}

// window is how many pages batch passes on at a time, as many as btree.FindAll asks for.
const window = 64

// batch puts page ids[i] into out[i]. Pages that are not in memory are read in one submission; the others are hits of the visitor.
func (c *Cached) batch(ids []page.ID, level int, out [][]byte, v *cache.Visitor) error {
	var cached [window]cache.ID
	for len(ids) > 0 {
		n := min(len(ids), window)
		for i, id := range ids[:n] {
			cached[i] = cache.ID(id)
		}
		if err := c.cache.Pages(cached[:n], hintFor(level), out[:n], v); err != nil {
			return err
		}
		ids, out = ids[n:], out[n:]
	}
	return nil
}

// read fills a frame of the cache.
func (c *Cached) read(id cache.ID, buf []byte) error { return Read(c.pager, page.ID(id), buf) }

// readBatch fills several frames in one submission, and verifies each page.
func (c *Cached) readBatch(reads []cache.Read) {
	c.batchReads.Add(1)
	c.batchPages.Add(uint64(len(reads)))
	batch := make([]pager.Read, len(reads))
	for i := range reads {
		batch[i] = pager.Read{ID: page.ID(reads[i].ID), Buf: reads[i].Buf}
	}
	_ = c.pager.ReadPages(batch) // each read has its own error
	for i := range reads {
		if reads[i].Err = batch[i].Err; reads[i].Err == nil {
			reads[i].Err = verify(c.pager, batch[i].ID, batch[i].Buf)
		}
	}
}

// Read reads a page past the cache, and verifies it.
func Read(p *pager.Reader, id page.ID, buf []byte) error {
	if err := p.ReadPage(id, buf); err != nil {
		return err
	}
	return verify(p, id, buf)
}

// verify checks the structure of a page whose checksum is correct.
func verify(p *pager.Reader, id page.ID, buf []byte) error {
	if t := page.ReadHeader(buf).Type; t != page.TypeLeaf && t != page.TypeInner {
		return nil // package blob checks its pages when it decodes them
	}
	if err := page.Verify(buf); err != nil {
		return p.Corrupt(id, err.Error())
	}
	return nil
}

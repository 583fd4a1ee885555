package storage

import (
	"fmt"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// pages is the engine's way to tree and data pages: through the cache for readers, past it for merges. A page is verified when it
// enters, so that readers may trust it.
type pageSource struct {
	pager *pager.Pager
	cache *cache.Cache

	batchReads, batchPages atomic.Uint64 // submissions of several pages, and the pages in them
}

func (p *pageSource) open(bytes int64, registry *pin.Registry) (err error) {
	p.cache, err = cache.New(cache.Config{
		Bytes: bytes, PageSize: p.pager.PageSize(), Registry: registry, Load: p.readCached, LoadBatch: p.readBatch,
	})
	return err
}

// forget is told of every page before its id is used again.
func (p *pageSource) forget(id page.ID) {
	if p.cache != nil { // not while the file is being opened
		p.cache.Forget(cache.ID(id))
	}
}

// hintFor: an inner node serves hundreds of leaves.
func hintFor(level int) cache.Hint {
	if level > 0 {
		return cache.VeryHigh
	}
	return cache.Default
}

// Page implements btree.Source. The bytes live as long as the caller's slot protects it.
func (p *pageSource) Page(id page.ID, level int) ([]byte, error) {
	return p.cache.Page(cache.ID(id), hintFor(level))
}

// pagesWindow is how many pages batch passes on at a time, as many as FindAll asks for.
const pagesWindow = 64

// batch puts page ids[i] into out[i]: what is not in memory is read in one submission, what is adds to hits.
func (p *pageSource) batch(ids []page.ID, level int, out [][]byte, hits *pin.Counter) error {
	var window [pagesWindow]cache.ID
	for len(ids) > 0 {
		n := min(len(ids), pagesWindow)
		for i, id := range ids[:n] {
			window[i] = cache.ID(id)
		}
		if err := p.cache.Pages(window[:n], hintFor(level), out[:n], hits); err != nil {
			return err
		}
		ids, out = ids[n:], out[n:]
	}
	return nil
}

func (p *pageSource) readCached(id cache.ID, buf []byte) error {
	return readPage(p.pager, page.ID(id), buf)
}

// loadBatch reads several pages in one submission and verifies each.
func (p *pageSource) readBatch(reads []cache.Read) {
	p.batchReads.Add(1)
	p.batchPages.Add(uint64(len(reads)))
	batch := make([]pager.Read, len(reads))
	for i := range reads {
		batch[i] = pager.Read{ID: page.ID(reads[i].ID), Buf: reads[i].Buf}
	}
	_ = p.pager.ReadPages(batch) // each read has its own error
	for i := range reads {
		if reads[i].Err = batch[i].Err; reads[i].Err == nil {
			reads[i].Err = verifyPage(p.pager, batch[i].ID, batch[i].Buf)
		}
	}
}

// load reads and verifies a page past the cache.
func (p *pageSource) read(id page.ID, buf []byte) error { return readPage(p.pager, id, buf) }

func readPage(p *pager.Pager, id page.ID, buf []byte) error {
	if err := p.ReadPage(id, buf); err != nil {
		return err
	}
	return verifyPage(p, id, buf)
}

func verifyPage(p *pager.Pager, id page.ID, buf []byte) error {
	if t := page.ReadHeader(buf).Type; t != page.TypeLeaf && t != page.TypeInner {
		return nil // rows and bulk pages are decoded with checks
	}
	if err := page.Verify(buf); err != nil {
		return p.Corrupt(id, err.Error())
	}
	return nil
}

// mergeReads is how often a merge tries to read a page before it goes round it for good: a bit may have turned on the way.
const mergeReads = 3

// private is a source that reads past the cache into buffers of its own: a merge touches each page once, and must neither
// hold frames for seconds nor push out what readers need.
type mergeSource struct {
	pages      *pageSource
	buf        []byte
	prefetched []pager.Read // in the order in which they will be asked for
	slab       []byte       // their buffers
}

func (p *pageSource) private() *mergeSource {
	return &mergeSource{pages: p, buf: vfs.AlignedBuffer(p.pager.PageSize())}
}

// prefetchMax bounds the memory of what was foreseen: as many leaves as a merge plans at a time.
const prefetchMax = 32

// Foresee implements btree.Prefetcher: it reads the leaves in one submission. What cannot be read so is read again when it is asked for,
// and fails then.
func (p *mergeSource) Prefetch(leaves []page.ID) {
	p.prefetched = p.prefetched[:0]
	if len(leaves) < 2 {
		return
	}
	size := p.pages.pager.PageSize()
	if p.slab == nil {
		p.slab = vfs.AlignedBuffer(prefetchMax * size)
	}
	for i, id := range leaves[:min(len(leaves), prefetchMax)] {
		p.prefetched = append(p.prefetched, pager.Read{ID: id, Buf: p.slab[i*size : (i+1)*size]})
	}
	_ = p.pages.pager.ReadPages(p.prefetched)
}

// Page implements btree.Source; the bytes live until the next call.
func (p *mergeSource) Page(id page.ID, _ int) ([]byte, error) {
	for i := range p.prefetched {
		if r := &p.prefetched[i]; r.ID == id && r.Err == nil && verifyPage(p.pages.pager, id, r.Buf) == nil {
			p.prefetched = p.prefetched[i:]
			return r.Buf, nil
		}
	}
	err := p.pages.read(id, p.buf)
	for try := 1; err != nil && try < mergeReads; try++ {
		err = p.pages.read(id, p.buf)
	}
	if err != nil {
		return nil, fmt.Errorf("merge: %w", err)
	}
	return p.buf, nil
}

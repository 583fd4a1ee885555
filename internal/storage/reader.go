package storage

import (
	"sync"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Reader is one session's way to tree and data pages: through the cache, counting what it finds there. The count lies in a line of the
// reader's own, so that a hit still writes nothing shared. A Reader is not for concurrent use, and is kept and used again rather than
// dropped: the engine remembers each.
type Reader struct {
	engine *Engine
	pages  *pageSource
	hits   pin.Counter
}

// readers are those there are, for their counts.
type readers struct {
	mu  sync.Mutex
	all []*Reader
}

// NewReader makes a reader.
func (e *Engine) NewReader() *Reader {
	r := &Reader{engine: e, pages: e.pages}
	e.readers.mu.Lock()
	defer e.readers.mu.Unlock()
	e.readers.all = append(e.readers.all, r)
	return r
}

// hits is how many pages all readers found in memory.
func (r *readers) hits() (n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, one := range r.all {
		n += one.hits.Count()
	}
	return n
}

// Page implements btree.Source. The bytes live as long as the caller's slot protects it.
func (r *Reader) Page(id page.ID, level int) ([]byte, error) {
	return r.pages.cache.Visit(cache.ID(id), hintFor(level), &r.hits)
}

// BlobPage implements rows.PageSource.
func (r *Reader) BlobPage(id page.ID) ([]byte, error) {
	return r.pages.cache.Visit(cache.ID(id), cache.Default, &r.hits)
}

// Pages implements btree.BatchSource: what is not in memory is read in one submission.
func (r *Reader) Pages(ids []page.ID, level int, out [][]byte) error {
	return r.pages.batch(ids, level, out, &r.hits)
}

// scanning is a reader whose visits make no leaf hot: a scan of any length leaves point reads their pages.
type scanning Reader

// Page implements btree.Source.
func (s *scanning) Page(id page.ID, level int) ([]byte, error) {
	hint := cache.Low
	if level > 0 {
		hint = cache.VeryHigh
	}
	return s.pages.cache.Visit(cache.ID(id), hint, &s.hits)
}

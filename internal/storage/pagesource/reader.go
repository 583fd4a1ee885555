package pagesource

import (
	"time"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Reader is one session's source of tree and blob pages. It reads through the cache and counts hits. The count is in a
// cache line of the reader's own, so that a hit writes nothing shared. A Reader is not for concurrent use. A session
// keeps its Reader and uses it again, because Cached keeps a reference to each of them.
type Reader struct {
	cached  *Cached
	visitor cache.Visitor
}

// NewReader makes a reader.
func (c *Cached) NewReader() *Reader {
	r := &Reader{cached: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.readers = append(c.readers, r)
	return r
}

// Hits is how many pages the reader found in memory. Called by the reader's owner.
func (r *Reader) Hits() uint64 {
	r.visitor.Hits.Flush()
	return r.visitor.Hits.Count()
}

// Flush publishes the hits that were counted, for Cached.Stats. Called by the reader's owner when it pauses.
func (r *Reader) Flush() { r.visitor.Hits.Flush() }

// SetWaits says whether the reader waits for pages that are not in memory, as it does at first. Otherwise its errors are
// ErrWouldWait. Called by the reader's owner.
func (r *Reader) SetWaits(waits bool) { r.visitor.NoWait = !waits }

// TakeReads returns how many pages the reader has waited for since the last call, and how long.
func (r *Reader) TakeReads() (pages uint64, took time.Duration) { return r.visitor.TakeReads() }

// Waits is what SetWaits has set.
func (r *Reader) Waits() bool { return !r.visitor.NoWait }

// ErrWouldWait is the error of a reader that does not wait for a page that is not in memory.
var ErrWouldWait = cache.ErrWouldWait

// Page implements btree.Source. The bytes are valid until the caller leaves the guard of its slot.
func (r *Reader) Page(id page.ID, level int) ([]byte, error) {
	return r.cached.cache.Visit(cache.ID(id), hintFor(level), &r.visitor)
}

// BlobPage implements blob.PageSource.
func (r *Reader) BlobPage(id page.ID) ([]byte, error) {
	return r.cached.cache.Visit(cache.ID(id), cache.Default, &r.visitor)
}

// Pages implements btree.BatchSource. Pages that are not in memory are read in one submission.
func (r *Reader) Pages(ids []page.ID, level int, out [][]byte) error {
	return r.cached.batch(ids, level, out, &r.visitor)
}

// Scanner is a Reader whose visits make no leaf and no blob page hot: a scan of any length leaves the pages of point reads in the cache.
type Scanner Reader

// Scanner returns the reader as the source of a scan.
func (r *Reader) Scanner() *Scanner { return (*Scanner)(r) }

// Page implements btree.Source.
func (s *Scanner) Page(id page.ID, level int) ([]byte, error) {
	hint := cache.Low
	if level > 0 {
		hint = cache.VeryHigh
	}
	return s.cached.cache.Visit(cache.ID(id), hint, &s.visitor)
}

// BlobPage implements blob.PageSource. A page with several values is visited as often, one after the other.
func (s *Scanner) BlobPage(id page.ID) ([]byte, error) {
	return s.cached.cache.Visit(cache.ID(id), cache.Low, &s.visitor)
}

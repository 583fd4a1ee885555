package pagesource

import (
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

const (
	// mergeReads is how often a merge tries to read a page before it reports damage, and the page is quarantined for good:
	// a bit may have flipped on the way from the device.
	mergeReads = 3
	// prefetchMax bounds the memory of prefetched pages: as many leaves as a merge plans at a time.
	prefetchMax = 32
)

// Merge is the source of one worker of a merge. It reads past the cache into buffers of its own: a merge visits each page
// once, and must neither hold frames for seconds nor evict what readers need.
type Merge struct {
	pager      *pager.Reader
	buf        []byte
	prefetched []pager.Read // in the order in which the merge will ask for them
	slab       []byte       // their buffers
}

// NewMerge makes a source for one worker.
func NewMerge(p *pager.Reader) *Merge {
	return &Merge{pager: p, buf: vfs.AlignedBuffer(p.PageSize())}
}

// Prefetch implements btree.Prefetcher: it reads the leaves in one submission. A page that cannot be read in this way is
// read again when the merge asks for it, and the error is returned then.
func (m *Merge) Prefetch(leaves []page.ID) {
	m.prefetched = m.prefetched[:0]
	if len(leaves) < 2 {
		return
	}
	size := m.pager.PageSize()
	if m.slab == nil {
		m.slab = vfs.AlignedBuffer(prefetchMax * size)
	}
	for i, id := range leaves[:min(len(leaves), prefetchMax)] {
		m.prefetched = append(m.prefetched, pager.Read{ID: id, Buf: m.slab[i*size : (i+1)*size]})
	}
	_ = m.pager.ReadPages(m.prefetched)
}

// Page implements btree.Source; the bytes are valid until the next call.
func (m *Merge) Page(id page.ID, _ int) ([]byte, error) {
	for i := range m.prefetched {
		if r := &m.prefetched[i]; r.ID == id && r.Err == nil && verify(m.pager, id, r.Buf) == nil {
			m.prefetched = m.prefetched[i:]
			return r.Buf, nil
		}
	}
	err := Read(m.pager, id, m.buf)
	for try := 1; err != nil && try < mergeReads; try++ {
		err = Read(m.pager, id, m.buf)
	}
	if err != nil {
		return nil, fmt.Errorf("merge: %w", err)
	}
	return m.buf, nil
}

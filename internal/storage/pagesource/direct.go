package pagesource

import (
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Direct is a source of verified tree pages that reads past the cache, for walks that look at one page at a time.
type Direct struct {
	pager *pager.Reader
	buf   []byte
}

// NewDirect makes a source with a buffer of its own.
func NewDirect(p *pager.Reader) *Direct {
	return &Direct{pager: p, buf: vfs.AlignedBuffer(p.PageSize())}
}

// Page implements btree.Source; the bytes are valid until the next call.
func (d *Direct) Page(id page.ID, _ int) ([]byte, error) {
	if err := Read(d.pager, id, d.buf); err != nil {
		return nil, err
	}
	return d.buf, nil
}

// Correct returns page id, for which Page has just reported damage, if one flipped bit explains it (see page.CorrectBit), or nil.
func (d *Direct) Correct(id page.ID) []byte {
	if !page.CorrectBit(d.buf, id) {
		return nil
	}
	return d.buf
}

// WholeTree is a source that gives each page a buffer of its own, for cursors, which need a path of pages at a time.
type WholeTree struct{ Pager *pager.Reader }

// Page implements btree.Source.
func (w WholeTree) Page(id page.ID, level int) ([]byte, error) {
	return NewDirect(w.Pager).Page(id, level)
}

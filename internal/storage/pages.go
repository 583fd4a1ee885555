package storage

import (
	"fmt"
	"sync"

	"epochkv/internal/storage/page"
	"epochkv/internal/storage/pager"
)

// pages is the engine's way to tree and data pages: through the cache for readers, past it for merges. A page is verified when it
// enters, so that readers may trust it.
type pages struct {
	pager *pager.Pager
	cache sync.Map // page.ID -> []byte
}

func (p *pages) forget(id page.ID) { p.cache.Delete(id) }

// Page implements btree.Source. The bytes live as long as the caller's slot protects it.
func (p *pages) Page(id page.ID, _ int) ([]byte, error) {
	if buf, ok := p.cache.Load(id); ok {
		return buf.([]byte), nil
	}
	buf := make([]byte, p.pager.PageSize())
	if err := p.load(id, buf); err != nil {
		return nil, err
	}
	p.cache.Store(id, buf)
	return buf, nil
}

// DataPage implements rows.PageSource.
func (p *pages) DataPage(id page.ID) ([]byte, error) { return p.Page(id, 0) }

// load reads and verifies a page.
func (p *pages) load(id page.ID, buf []byte) error {
	return loadPage(p.pager, id, buf)
}

func loadPage(p *pager.Pager, id page.ID, buf []byte) error {
	if err := p.ReadPage(id, buf); err != nil {
		return err
	}
	if t := page.ReadHeader(buf).Type; t != page.TypeLeaf && t != page.TypeInner {
		return nil // rows and bulk pages are decoded with checks
	}
	if err := page.Verify(buf); err != nil {
		return p.Corrupt(id, err.Error())
	}
	return nil
}

// private is a source that reads past the cache into one buffer of its own: a merge touches each page once, and must neither
// hold frames for seconds nor push out what readers need.
type private struct {
	pages *pages
	buf   []byte
}

func (p *pages) private() *private { return &private{pages: p, buf: make([]byte, p.pager.PageSize())} }

// Page implements btree.Source; the bytes live until the next call.
func (p *private) Page(id page.ID, _ int) ([]byte, error) {
	if err := p.pages.load(id, p.buf); err != nil {
		return nil, fmt.Errorf("merge: %w", err)
	}
	return p.buf, nil
}

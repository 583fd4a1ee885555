package repairtree

import (
	"slices"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// Placed is a source that refuses skipped pages with the keys of another place, see Page.Misplaced. Other skipped pages are what they were.
type Placed struct {
	*pagesource.Reader
	tree  *Tree
	pager *pager.Reader
}

// Placed returns such a source.
func (s *Tree) Placed(source *pagesource.Reader, p *pager.Reader) *Placed {
	return &Placed{source, s, p}
}

// Page implements btree.Source.
func (s *Placed) Page(id page.ID, level int) ([]byte, error) {
	b, err := s.Reader.Page(id, level)
	if err == nil {
		err = s.check(id, b)
	}
	return b, err
}

// Pages implements btree.BatchSource.
func (s *Placed) Pages(ids []page.ID, level int, out [][]byte) error {
	if err := s.Reader.Pages(ids, level, out); err != nil {
		return err
	}
	for i, id := range ids {
		if err := s.check(id, out[i]); err != nil {
			return err
		}
	}
	return nil
}

func (s *Placed) check(id page.ID, b []byte) error {
	if _, skipped := s.tree.avoid[id]; !skipped {
		return nil
	}
	i := slices.IndexFunc(s.tree.pages, func(q Page) bool { return q.ID == id })
	if err := s.tree.pages[i].Misplaced(b); err != nil {
		return s.pager.Corrupt(id, err.Error())
	}
	return nil
}

// Misplaced is why the contents of a page are not those of its place, or nil. A device that has lost a write has an older page there, with a right
// checksum, which says nothing of the keys of its place.
func (p *Page) Misplaced(b []byte) error { return btree.Inside(b, p.Level, &p.Lower, p.Upper) }

package pagesource

import (
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Skipping is a source that does not return quarantined pages, whatever their bytes are.
type Skipping struct {
	btree.Source
	Refuse func(page.ID) error // the error for a quarantined page, nil for any other
}

// Page implements btree.Source.
func (s Skipping) Page(id page.ID, level int) ([]byte, error) {
	if err := s.Refuse(id); err != nil {
		return nil, err
	}
	return s.Source.Page(id, level)
}

package repairtree

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestAMergeMayMeetManyDamagedPages: a device that has lost a gigabyte makes a hundred thousand of them, and the next merge cannot begin before
// they are known.
func TestAMergeMayMeetManyDamagedPages(t *testing.T) {
	const pages, bound = 200000, 10 * time.Second
	found, damage := make([]btree.UnreadablePage, pages), errors.New("damaged")
	for i := range found {
		found[i] = btree.UnreadablePage{ID: page.ID(i + 2), Err: damage, Lower: page.Separator{Key: fmt.Appendf(nil, "%06d", i), Trailer: page.NoTrailer}}
		if i > 0 {
			found[i-1].Upper = &found[i].Lower
		}
	}
	var s *Tree
	began := time.Now()
	for range 2 {
		next, changed := s.With(found, 7)
		if changed != (s == nil) || len(next.Pages()) != pages {
			t.Fatalf("%d pages are known, changed %v", len(next.Pages()), changed)
		}
		s = next
	}
	if took := time.Since(began); took > bound {
		t.Errorf("%d damaged pages took %v", pages, took)
	}
}

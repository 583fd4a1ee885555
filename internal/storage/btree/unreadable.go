package btree

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// A page that cannot be read stops no merge that does not have to rewrite it. If a merge wants the
// page only to join it with an underfull neighbour, the neighbour stays underfull. If the merge
// would have rewritten the page, it has to fail: most often there is input for the page, and the
// contents of the page decide what becomes of the input. The merge continues to the end all the
// same, so that its UnreadableError names every such page. The caller then removes the input for
// these pages, lets the merge avoid them, and tries again.
//
// Older versions of a key may be on an avoided page after the leaf with the key's newer versions.
// They stay. So the tombstone of such a key stays, too: the page may become readable again.
//
// The key range of an avoided page does not grow when all versions of the leaves beside it are dead:
// a leaf with one tombstone stays, because keys that are known to be absent would be damaged
// otherwise. So does the first leaf of the tree. The range grows if the page was not avoided yet.
// Input for the keys of the larger range then makes an UnreadableError of the same page again, with
// its new bounds.

// UnreadablePage is a page of the base that the merge would have rewritten but could not read.
type UnreadablePage struct {
	ID    page.ID
	Level int
	Lower page.Separator  // lower bound of the keys on or below the page
	Upper *page.Separator // upper bound; nil if there is none
	Err   error           // why the page cannot be read
}

// UnreadableError ends a merge that needed pages that it could not read.
type UnreadableError struct {
	Pages []UnreadablePage // each page once
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("%d pages cannot be read, page %d first: %v", len(e.Pages), e.Pages[0].ID, e.Pages[0].Err)
}

// Unwrap is the error of the first page.
func (e *UnreadableError) Unwrap() error { return e.Pages[0].Err }

// unreadablePages collects the pages that a merge needed and could not read.
type unreadablePages struct {
	mu    sync.Mutex
	pages []UnreadablePage
	at    map[page.ID]struct{} // has each of them
}

// add records a page. Partitions that share a leaf may each report it, with the same range.
func (l *unreadablePages) add(p UnreadablePage) {
	p.Lower.Key = bytes.Clone(p.Lower.Key)
	if p.Upper != nil {
		p.Upper = &page.Separator{Key: bytes.Clone(p.Upper.Key), Trailer: p.Upper.Trailer}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.at[p.ID]; known {
		return
	}
	if l.at == nil {
		l.at = map[page.ID]struct{}{}
	}
	l.at[p.ID] = struct{}{}
	l.pages = append(l.pages, p)
}

// err is an UnreadableError, or nil, when no page comes any more. The pages are in key order, whichever worker found them first.
func (l *unreadablePages) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pages) == 0 {
		return nil
	}
	slices.SortFunc(l.pages, func(a, b UnreadablePage) int { return a.Lower.Compare(b.Lower.Key, b.Lower.Trailer) })
	return &UnreadableError{Pages: l.pages}
}

var errAvoided = errors.New("page is avoided, but the merge has input for it")

func (m *merge) isUnreadable(err error) bool {
	return err != nil && (errors.Is(err, errAvoided) || m.Unreadable != nil && m.Unreadable(err))
}

func (m *merge) avoids(id page.ID) bool {
	_, ok := m.Avoid[id]
	return ok
}

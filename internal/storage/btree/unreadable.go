package btree

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// A page that cannot be read stops no merge that has nothing to do with it. Where a merge wants it for company only, for an underfull neighbour, it
// does without. Where it would have rewritten the page the merge has to give up: most often the input falls on it, and what the page holds
// decides what becomes of the input. It goes on to the end all the same, so that the LostError names every such page. Whoever started it
// then keeps that input out, lets the merge avoid those pages, and tries again.
//
// Older versions of a key may be on a page that is avoided, behind the leaf with its newer ones. They stay, and so its deletion stays, too: the
// page may be read again.
//
// A page that is avoided for long may come to stand for more keys than when it was lost: what stood behind it went when nobody saw it any
// more. Input for such keys makes a LostError of the page again, with its new bounds.

// LostPage is a page of the base that the merge would have rewritten and could not read.
type UnreadablePage struct {
	ID    page.ID
	Level int
	Lower page.Separator  // what is on or below the page lies from here
	Upper *page.Separator // up to here; nil if there is no bound
	Err   error           // what kept it from being read
}

// LostError ends a merge that needed pages that it could not read.
type UnreadableError struct {
	Pages []UnreadablePage // each once
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("%d pages cannot be read, page %d first: %v", len(e.Pages), e.Pages[0].ID, e.Pages[0].Err)
}

// Unwrap is what kept the first page from being read.
func (e *UnreadableError) Unwrap() error { return e.Pages[0].Err }

// lost collects the pages that a merge needed in vain.
type unreadablePages struct {
	mu    sync.Mutex
	pages []UnreadablePage
}

// add notes a page. Parts that share a leaf each know of their share.
func (l *unreadablePages) add(p UnreadablePage) {
	p.Lower.Key = bytes.Clone(p.Lower.Key)
	if p.Upper != nil {
		p.Upper = &page.Separator{Key: bytes.Clone(p.Upper.Key), Trailer: p.Upper.Trailer}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	i := slices.IndexFunc(l.pages, func(q UnreadablePage) bool { return q.ID == p.ID })
	if i < 0 {
		l.pages = append(l.pages, p)
		return
	}
	q := &l.pages[i]
	if q.Lower.Compare(p.Lower.Key, p.Lower.Trailer) > 0 {
		q.Lower = p.Lower
	}
	if q.Upper != nil && (p.Upper == nil || q.Upper.Compare(p.Upper.Key, p.Upper.Trailer) < 0) {
		q.Upper = p.Upper
	}
}

// err is a LostError, or nil. The pages stand in key order, whoever met them first.
func (l *unreadablePages) err() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.pages) == 0 {
		return nil
	}
	slices.SortFunc(l.pages, func(a, b UnreadablePage) int { return a.Lower.Compare(b.Lower.Key, b.Lower.Trailer) })
	return &UnreadableError{Pages: l.pages}
}

var errAvoided = errors.New("the merge is to avoid this page, and has something for it")

func (m *merge) isUnreadable(err error) bool {
	return err != nil && (errors.Is(err, errAvoided) || m.Unreadable != nil && m.Unreadable(err))
}

func (m *merge) avoids(id page.ID) bool {
	_, ok := m.Avoid[id]
	return ok
}

package storage

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

const pageRemedy = "run kvctl verify for the extent; restore a backup, or extract what is readable with kvctl salvage"

// damage turns a damaged page into the engine's error, with the range of keys that it may hide if
// it was met on the way to key. Other errors pass.
func (e *Engine) damage(err error, root btree.Root, key []byte) error {
	found, ok := errors.AsType[*pager.CorruptError](err)
	switch {
	case ok:
	case errors.Is(err, btree.ErrStructure), errors.Is(err, blob.ErrBadRef): // pages that are sound, each by itself
		found = &pager.CorruptError{File: e.options.dataPath(), Reason: err.Error()}
	default:
		return err
	}
	e.counters.damaged.Add(1)
	out := &CorruptionError{File: found.File, Offset: found.Offset, Reason: found.Reason, Remedy: pageRemedy}
	if key != nil {
		var level int
		out.KeyLower, out.KeyUpper, level = e.rangeOf(root, key, found.Page)
		if level > 0 {
			e.rebuilds.request(found.Page)
		}
	}
	return out
}

// Damage is nil, or the first known damage that needs attention: what prevents checkpoints, or else
// a page that they skip. Errors of reads are returned to the readers.
func (e *Engine) Damage() error {
	if blocked := e.checkpoints.blocked.Load(); blocked != nil && errors.Is(*blocked, ErrDamaged) {
		return *blocked
	}
	skipped := e.view.Load().repairTree.Pages()
	if len(skipped) == 0 {
		return nil
	}
	p := &skipped[0]
	reason := p.Reason
	if lost := e.rebuilds.reasonOf(p.ID); lost != "" {
		reason = fmt.Sprintf("%s; the node cannot be rebuilt: %s", reason, lost)
	}
	return &CorruptionError{
		File: e.options.dataPath(), Offset: int64(p.ID) * int64(e.pager.PageSize()), Reason: reason, Remedy: pageRemedy,
		KeyLower: boundKey(&p.Lower), KeyUpper: boundAbove(p.Upper),
	}
}

// rangeOf descends towards key until it reaches page bad, and returns the client keys between which
// that page is, nil for no bound, and the level at which the page is. It is zero if the page was not reached.
func (e *Engine) rangeOf(root btree.Root, key []byte, bad page.ID) (lower, upper []byte, level int) {
	id := root.ID
	for level = root.Level; level > 0 && id != bad; level-- {
		p, err := e.pages.Page(id, level)
		if err != nil || !page.IsTree(p, level) {
			return lower, upper, 0
		}
		node := page.Inner(p)
		i := node.Search(key, page.NoTrailer)
		if i > 0 {
			lower = userBound(node.Separator(nil, i).Key)
		}
		if i+1 < node.Count() {
			next := node.Separator(nil, i+1)
			upper = boundAbove(&next)
		}
		id = node.Child(i)
	}
	return lower, upper, level
}

func userBound(separator []byte) []byte {
	if len(separator) == 0 || keys.SpaceOf(separator) != keys.SpaceUser {
		return nil
	}
	return bytes.Clone(keys.User(separator))
}

// IsDamage reports whether an error says that a page is damaged, and not that it could not be read.
func IsDamage(err error) bool { return pagesource.IsDamage(err) }

// ClientKeys are the client keys between two separators, nil for no bound. Versions of one key may
// fill several pages: a page that ends between two of them has some of the key.
func ClientKeys(lower, upper *page.Separator) (from, to []byte) {
	return boundKey(lower), boundAbove(upper)
}

// boundKey is the client key at which a range ends, nil for none.
func boundKey(s *page.Separator) []byte {
	if s == nil {
		return nil
	}
	return userBound(s.Key)
}

// boundAbove is boundKey for an upper bound. Versions of one key may fill several pages: a page
// that ends between two of them holds some of the key.
func boundAbove(s *page.Separator) []byte {
	bound := boundKey(s)
	if bound != nil && s.Trailer != page.NoTrailer {
		bound = append(bound, 0)
	}
	return bound
}

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
		at, reached := e.rangeOf(root, key, found.Page)
		e.hides(out, found.Page, &at, reached)
	}
	return out
}

// cursorDamage is damage for what has ended the walk of a tree's cursor, which knows where it was.
func (e *Engine) cursorDamage(c *btree.Cursor, root btree.Root, key []byte) error {
	at, known := c.Unread()
	if !known {
		return e.damage(c.Err(), root, key)
	}
	err := e.damage(c.Err(), root, nil)
	if out, ok := errors.AsType[*CorruptionError](err); ok {
		found, _ := errors.AsType[*pager.CorruptError](c.Err())
		if found == nil {
			found = &pager.CorruptError{}
		}
		e.hides(out, found.Page, &at, true)
	}
	return err
}

// hides completes an error with the bounds of the page, and asks for an inner page to be rebuilt.
func (e *Engine) hides(out *CorruptionError, id page.ID, at *btree.UnreadPage, reached bool) {
	out.KeyLower, out.KeyUpper = boundKey(at.Lower), boundAbove(at.Upper)
	if !reached {
		return
	}
	out.Hides = &HiddenRange{Lower: internalBound(at.Lower), Upper: internalBound(at.Upper), Newest: at.Newest}
	if at.Level > 0 && id != 0 {
		e.rebuilds.request(id)
	}
}

// internalBound is the internal key at which a range begins or ends, nil for none. If the versions of a key continue after the
// separator, the key belongs to the page before it, which has the newer ones.
func internalBound(s *page.Separator) []byte {
	if s == nil {
		return nil
	}
	bound := bytes.Clone(s.Key)
	if s.Trailer != page.NoTrailer {
		bound = append(bound, 0)
	}
	return bound
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

// rangeOf descends towards key until it reaches page bad, and returns where that page is, and whether it was reached.
func (e *Engine) rangeOf(root btree.Root, key []byte, bad page.ID) (at btree.UnreadPage, reached bool) {
	id := root.ID
	at.Level, at.Newest = root.Level, keys.MaxEpoch
	for ; at.Level > 0 && id != bad; at.Level-- {
		p, err := e.pages.Page(id, at.Level)
		if err != nil || !page.IsTree(p, at.Level) {
			return at, false
		}
		node := page.Inner(p)
		i := node.Search(key, page.NoTrailer)
		at.Enter(node, i)
		id = node.Child(i)
	}
	return at, id == bad
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

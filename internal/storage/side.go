package storage

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"epochkv/internal/storage/btree"
	"epochkv/internal/storage/keys"
	"epochkv/internal/storage/page"
	"epochkv/internal/storage/pager"
	"epochkv/internal/storage/pager/rows"
)

// The side tree lets checkpoints go round pages of the tree that cannot be read any more (ADR 0018).
//
//	lost page    a page of the tree, leaf or inner node, that a merge needed and could not read
//	lost range   what it stood for: from its separator to the next, trailers included
//	side tree    a second tree in the same file: a record for each lost page, and every version that was merged since into a lost range
//
//	tree        [ a ... f | f ... m | m ... ]      a reader of h asks the side tree first; what that does not have at
//	                       /////////               the reader's snapshot only the lost page could tell: DATA_LOSS
//	side tree              h@90  k@87 (deleted)
//
// The tree itself stays as it was: the lost page keeps its place, unread by merges and never freed, so that a device that comes to its
// senses, or salvage, can still read it. Versions in the side tree are newer than everything that the tree has of their keys, and it keeps
// deletions, so that asking it first is right whether the page can be read or not. Walks in key order refuse a lost page by
// its id: they would otherwise show what it says to be newest of keys of which the side tree knows better.
//
// Invariants:
//   - no version of a key in a lost range goes into the tree, once the range is in the side tree;
//   - a merge neither reads nor replaces a lost page, nor anything below it;
//   - the side tree and the ranges that a view names belong to the same durable state.
//
// A side is immutable; nil stands for a store without lost pages.
type side struct {
	root   btree.Root
	lost   []lostPage // by lower bound
	avoid  map[page.ID]struct{}
	ranges []lostRange // of all lost pages: disjoint, ascending
}

// lostPage is what a record in the side tree says.
type lostPage struct {
	id         page.ID
	level      int
	checkpoint uint64 // that went round it first
	lower      page.Separator
	upper      *page.Separator // nil: no bound
	reason     string
	unrecorded bool // the side tree does not have it yet
}

// lostRange is [lower, upper); a nil upper is no bound.
type lostRange struct {
	lower page.Separator
	upper *page.Separator
}

// behind reports whether the range ends at or in front of (key, t).
func (r *lostRange) behind(key []byte, t keys.Trailer) bool {
	return r.upper != nil && r.upper.Compare(key, t) <= 0
}

// covers reports whether (key, t) lies in a lost range.
func (s *side) covers(key []byte, t keys.Trailer) bool {
	if s == nil {
		return false
	}
	i := s.find(key, t)
	return i < len(s.ranges) && s.ranges[i].lower.Compare(key, t) <= 0
}

// find is the first range that does not end in front of (key, t).
func (s *side) find(key []byte, t keys.Trailer) int {
	i, _ := slices.BinarySearchFunc(s.ranges, 0, func(r lostRange, _ int) int {
		if r.behind(key, t) {
			return -1
		}
		return 1
	})
	return i
}

// get is btree.Get for what the side tree has. What it does not have only the tree can tell.
func (s *side) get(src btree.Source, key []byte, at keys.Epoch) (btree.Version, bool, error) {
	if !s.covers(key, keys.MakeTrailer(at, 0xff)) {
		return btree.Version{}, false, nil
	}
	return btree.Get(src, s.root, key, at)
}

// with adds pages that a merge has found to be lost, or with wider bounds than before. It reports false if there is nothing new in that.
func (s *side) with(found []btree.LostPage, checkpoint uint64) (*side, bool) {
	next := &side{}
	if s != nil {
		next.root, next.lost = s.root, slices.Clone(s.lost)
	}
	changed := false
	for i := range found {
		changed = next.add(&found[i], checkpoint) || changed
	}
	next.index()
	return next, changed
}

func (s *side) add(f *btree.LostPage, checkpoint uint64) (changed bool) {
	p := lostPage{
		id: f.ID, level: f.Level, checkpoint: checkpoint, lower: f.Lower, upper: f.Upper, reason: f.Err.Error(), unrecorded: true,
	}
	if damage, ok := errors.AsType[*pager.CorruptError](f.Err); ok {
		p.reason = damage.Reason
	}
	p.reason = p.reason[:min(len(p.reason), lostReasonMax)]
	i := slices.IndexFunc(s.lost, func(q lostPage) bool { return q.id == p.id })
	if i < 0 {
		s.lost = append(s.lost, p)
		return true
	}
	old := &s.lost[i] // the reason that counts is the first
	if compareLower(p.lower, old.lower) >= 0 && compareUpper(p.upper, old.upper) <= 0 {
		return false
	}
	if compareLower(p.lower, old.lower) < 0 {
		old.lower = p.lower
	}
	if compareUpper(p.upper, old.upper) > 0 {
		old.upper = p.upper
	}
	old.unrecorded = true
	return true
}

func compareLower(a, b page.Separator) int { return a.Compare(b.Key, b.Trailer) }

func compareUpper(a, b *page.Separator) int {
	switch {
	case a == nil || b == nil:
		return cmp.Compare(btoi(a == nil), btoi(b == nil))
	default:
		return a.Compare(b.Key, b.Trailer)
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// index works out what follows from the lost pages.
func (s *side) index() {
	slices.SortFunc(s.lost, func(a, b lostPage) int { return cmp.Or(compareLower(a.lower, b.lower), cmp.Compare(a.id, b.id)) })
	s.avoid, s.ranges = make(map[page.ID]struct{}, len(s.lost)), nil
	for i := range s.lost {
		p := &s.lost[i]
		s.avoid[p.id] = struct{}{}
		if n := len(s.ranges); n > 0 && !s.ranges[n-1].behind(p.lower.Key, p.lower.Trailer) {
			if compareUpper(p.upper, s.ranges[n-1].upper) > 0 {
				s.ranges[n-1].upper = p.upper
			}
			continue
		}
		s.ranges = append(s.ranges, lostRange{p.lower, p.upper})
	}
}

// durable is the side after its records were merged into the tree at root.
func (s *side) durable(root btree.Root) *side {
	next := &side{root: root, lost: slices.Clone(s.lost), avoid: maps.Clone(s.avoid), ranges: s.ranges}
	for i := range next.lost {
		next.lost[i].unrecorded = false
	}
	return next
}

// tree is the root of the side tree.
func (s *side) tree() btree.Root {
	if s == nil {
		return btree.Root{}
	}
	return s.root
}

// records are the entries of lost pages that the side tree lacks.
func (s *side) records(epoch keys.Epoch) (entries []btree.Entry) {
	for i := range s.lost {
		if p := &s.lost[i]; p.unrecorded {
			entries = append(entries, btree.Entry{Key: lostKey(p.id), Value: p.encode(), Trailer: keys.MakeTrailer(epoch, keys.KindSet)})
		}
	}
	slices.SortFunc(entries, func(a, b btree.Entry) int { return bytes.Compare(a.Key, b.Key) })
	return entries
}

// sideRoot is the root of a state's side tree.
func sideRoot(p *pager.Pager) (btree.Root, error) {
	state := p.State()
	root, err := decodeSideRoot(&state)
	if err != nil {
		return btree.Root{}, p.Corrupt(page.ID(p.Checkpoint()%2), err.Error())
	}
	return root, nil
}

// loadSide reads the lost pages of a state.
func loadSide(p *pager.Pager, store *rows.Store) (*side, error) {
	root, err := sideRoot(p)
	if root.Empty() || err != nil {
		return nil, err
	}
	s := &side{root: root}
	var c btree.Cursor
	c.Reset(keeping{p}, root, keys.MaxEpoch, []byte{byte(keys.SpaceLost)}, []byte{byte(keys.SpaceLost) + 1})
	for ok := c.First(); ok; ok = c.Next() {
		value := c.Version().Value
		if c.Version().Large {
			if value, err = store.Append(nil, page.Ref(value), store.Direct()); err != nil {
				return nil, err
			}
		}
		lost, err := decodeLost(c.Key(), value)
		if err != nil {
			return nil, p.Corrupt(root.ID, err.Error())
		}
		s.lost = append(s.lost, lost)
	}
	if c.Err() != nil {
		return nil, fmt.Errorf("the side tree: %w", c.Err())
	}
	s.index()
	return s, nil
}

// keeping is a source whose pages stay, for walks that need a path of them.
type keeping struct{ pager *pager.Pager }

// Page implements btree.Source.
func (k keeping) Page(id page.ID, level int) ([]byte, error) {
	return newDirect(k.pager).Page(id, level)
}

// refusing is a source that does not show lost pages, whatever their bytes are.
type refusing struct {
	btree.Source
	side  *side
	pager *pager.Pager
}

// Page implements btree.Source.
func (r refusing) Page(id page.ID, level int) ([]byte, error) {
	if _, lost := r.side.avoid[id]; lost {
		i := slices.IndexFunc(r.side.lost, func(p lostPage) bool { return p.id == id })
		return nil, r.pager.Corrupt(id, r.side.lost[i].reason)
	}
	return r.Source.Page(id, level)
}

package storage

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
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
type repairTree struct {
	root   btree.Root
	mirror btree.Root        // a second tree with the same contents in pages of its own, for when one of the first is damaged; empty if there is none
	unused []btree.Root      // of the two, what was given up because of damage: the next merge frees its pages
	pages  []quarantinedPage // by lower bound
	avoid  map[page.ID]struct{}
	ranges []quarantinedRange // of all lost pages: disjoint, ascending
}

// quarantinedPage is what a record in the side tree says.
type quarantinedPage struct {
	id         page.ID
	level      int
	checkpoint uint64 // that went round it first
	lower      page.Separator
	upper      *page.Separator // nil: no bound
	reason     string
	unrecorded bool // the side tree does not have it yet
}

// quarantinedRange is [lower, upper); a nil upper is no bound.
type quarantinedRange struct {
	lower page.Separator
	upper *page.Separator
}

// behind reports whether the range ends at or in front of (key, t).
func (r *quarantinedRange) behind(key []byte, t keys.Trailer) bool {
	return r.upper != nil && r.upper.Compare(key, t) <= 0
}

// covers reports whether (key, t) lies in a lost range.
func (s *repairTree) covers(key []byte, t keys.Trailer) bool {
	if s == nil {
		return false
	}
	i := s.find(key, t)
	return i < len(s.ranges) && s.ranges[i].lower.Compare(key, t) <= 0
}

// mirrors reports whether a version of key goes into the side tree and into its mirror.
func (s *repairTree) mirrors(key []byte, at keys.Epoch) bool {
	return s != nil && s.mirrored() && s.covers(key, keys.MakeTrailer(at, keys.KindSet))
}

// find is the first range that does not end in front of (key, t).
func (s *repairTree) find(key []byte, t keys.Trailer) int {
	i, _ := slices.BinarySearchFunc(s.ranges, 0, func(r quarantinedRange, _ int) int {
		if r.behind(key, t) {
			return -1
		}
		return 1
	})
	return i
}

// get is btree.Get for what the side tree has. What it does not have only the tree can tell.
func (s *repairTree) get(src btree.Source, key []byte, at keys.Epoch) (btree.Version, bool, error) {
	if !s.covers(key, keys.MakeTrailer(at, 0xff)) {
		return btree.Version{}, false, nil
	}
	v, ok, err := btree.Get(src, s.root, key, at)
	if err != nil && IsDamage(err) && !s.mirror.Empty() {
		return btree.Get(src, s.mirror, key, at)
	}
	return v, ok, err
}

// changedSince is btree.ChangedSince for what the side tree has.
func (s *repairTree) changedSince(src btree.Source, lower, upper []byte, after keys.Epoch) (bool, error) {
	if s == nil {
		return false, nil
	}
	changed, err := btree.ChangedSince(src, s.root, lower, upper, after)
	if err != nil && IsDamage(err) && !s.mirror.Empty() {
		return btree.ChangedSince(src, s.mirror, lower, upper, after)
	}
	return changed, err
}

// without gives up the side tree or its mirror, whichever root is, if the other one is left.
func (s *repairTree) without(root btree.Root) (next *repairTree, ok bool) {
	if s == nil || s.mirror.Empty() || root != s.root && root != s.mirror {
		return s, false
	}
	c := *s
	next = &c
	if next.mirror = (btree.Root{}); root == s.root {
		next.root = s.mirror
	}
	next.unused = append(slices.Clone(s.unused), root)
	return next, true
}

// mirrored reports whether a merge builds a mirror: it is there from the beginning or not at all.
func (s *repairTree) mirrored() bool { return s.root.Empty() || !s.mirror.Empty() }

// with adds pages that a merge has found to be lost, or with wider bounds than before. It reports false if there is nothing new in that.
func (s *repairTree) with(found []btree.UnreadablePage, checkpoint uint64) (*repairTree, bool) {
	next := &repairTree{}
	if s != nil {
		next.root, next.mirror, next.unused, next.pages = s.root, s.mirror, s.unused, slices.Clone(s.pages)
	}
	changed := false
	for i := range found {
		changed = next.add(&found[i], checkpoint) || changed
	}
	next.index()
	return next, changed
}

func (s *repairTree) add(f *btree.UnreadablePage, checkpoint uint64) (changed bool) {
	p := quarantinedPage{
		id: f.ID, level: f.Level, checkpoint: checkpoint, lower: f.Lower, upper: f.Upper, reason: f.Err.Error(), unrecorded: true,
	}
	if damage, ok := errors.AsType[*pager.CorruptError](f.Err); ok {
		p.reason = damage.Reason
	}
	p.reason = p.reason[:min(len(p.reason), lostReasonMax)]
	i := slices.IndexFunc(s.pages, func(q quarantinedPage) bool { return q.id == p.id })
	if i < 0 {
		s.pages = append(s.pages, p)
		return true
	}
	old := &s.pages[i] // the reason that counts is the first
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
		return cmp.Compare(boolToInt(a == nil), boolToInt(b == nil))
	default:
		return a.Compare(b.Key, b.Trailer)
	}
}

func boolToInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// index works out what follows from the lost pages.
func (s *repairTree) index() {
	slices.SortFunc(s.pages, func(a, b quarantinedPage) int { return cmp.Or(compareLower(a.lower, b.lower), cmp.Compare(a.id, b.id)) })
	s.avoid, s.ranges = make(map[page.ID]struct{}, len(s.pages)), nil
	for i := range s.pages {
		p := &s.pages[i]
		s.avoid[p.id] = struct{}{}
		if n := len(s.ranges); n > 0 && !s.ranges[n-1].behind(p.lower.Key, p.lower.Trailer) {
			if compareUpper(p.upper, s.ranges[n-1].upper) > 0 {
				s.ranges[n-1].upper = p.upper
			}
			continue
		}
		s.ranges = append(s.ranges, quarantinedRange{p.lower, p.upper})
	}
}

// durable is the side after its records were merged into the trees at root and mirror.
func (s *repairTree) durable(root, mirror btree.Root) *repairTree {
	next := &repairTree{root: root, mirror: mirror, pages: slices.Clone(s.pages), avoid: maps.Clone(s.avoid), ranges: s.ranges}
	for i := range next.pages {
		next.pages[i].unrecorded = false
	}
	return next
}

// trees are the roots of the side tree and of its mirror.
func (s *repairTree) trees() (root, mirror btree.Root) {
	if s == nil {
		return btree.Root{}, btree.Root{}
	}
	return s.root, s.mirror
}

// records are the entries of lost pages that the side tree lacks.
func (s *repairTree) records(epoch keys.Epoch) (entries []btree.Entry) {
	for i := range s.pages {
		if p := &s.pages[i]; p.unrecorded {
			entries = append(entries, btree.Entry{Key: pageRecordKey(p.id), Value: p.encode(), Trailer: keys.MakeTrailer(epoch, keys.KindSet)})
		}
	}
	slices.SortFunc(entries, func(a, b btree.Entry) int { return bytes.Compare(a.Key, b.Key) })
	return entries
}

// repairTreeRoots are the roots of a state's side tree and of its mirror.
func repairTreeRoots(p *pager.Pager) (root, mirror btree.Root, err error) {
	state := p.State()
	if root, mirror, err = decodeRepairTreeRoots(&state); err != nil {
		return btree.Root{}, btree.Root{}, p.Corrupt(page.ID(p.Checkpoint()%2), err.Error())
	}
	return root, mirror, nil
}

// readRepairTree reads the lost pages of a state.
func readRepairTree(p *pager.Pager, store *blob.Store) (*repairTree, error) {
	root, mirror, err := repairTreeRoots(p)
	if root.Empty() || err != nil {
		return nil, err
	}
	s, err := readRecords(p, store, root)
	if err == nil {
		s.mirror = mirror
		return s, nil
	}
	if mirror.Empty() || !IsDamage(err) {
		return nil, err
	}
	if s, again := readRecords(p, store, mirror); again == nil {
		s.unused = []btree.Root{root}
		return s, nil
	}
	return nil, err
}

// readRecords reads them from the side tree or from its mirror.
func readRecords(p *pager.Pager, store *blob.Store, root btree.Root) (*repairTree, error) {
	s := &repairTree{root: root}
	var c btree.Cursor
	c.Reset(pagesource.WholeTree{Pager: p}, root, keys.MaxEpoch, []byte{byte(keys.SpaceRepairTree)}, []byte{byte(keys.SpaceRepairTree) + 1})
	for ok := c.First(); ok; ok = c.Next() {
		value := c.Version().Value
		if c.Version().Large {
			var err error
			if value, err = store.Append(nil, page.Ref(value), store.Direct()); err != nil {
				return nil, err
			}
		}
		lost, err := decodePageRecord(c.Key(), value)
		if err != nil {
			return nil, p.Corrupt(root.ID, err.Error())
		}
		s.pages = append(s.pages, lost)
	}
	if c.Err() != nil {
		return nil, fmt.Errorf("the side tree: %w", c.Err())
	}
	s.index()
	return s, nil
}

// skipping is a source that does not return quarantined pages.
func (s *repairTree) skipping(source btree.Source, p *pager.Pager) btree.Source {
	return pagesource.Skipping{Source: source, Refuse: func(id page.ID) error {
		if _, skipped := s.avoid[id]; !skipped {
			return nil
		}
		i := slices.IndexFunc(s.pages, func(q quarantinedPage) bool { return q.id == id })
		return p.Corrupt(id, s.pages[i].reason)
	}}
}

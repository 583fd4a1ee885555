package repairtree

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

// Tree is the repair tree of one state. It is immutable; a nil Tree stands for a store without skipped pages.
type Tree struct {
	root   btree.Root
	mirror btree.Root   // empty if there is none
	unused []btree.Root // of the two, the one that was abandoned because of damage: the next merge frees its pages
	pages  []Page       // by lower bound
	avoid  btree.Avoided
	ranges []keyRange // of all skipped pages: disjoint, ascending
}

// Page is the record of a skipped page.
type Page struct {
	ID         page.ID
	Level      int
	Checkpoint uint64 // the first one that skipped it
	Lower      page.Separator
	Upper      *page.Separator // nil: no bound
	Reason     string
	unrecorded bool // the repair tree does not have its record yet
}

// keyRange is [lower, upper); a nil upper is no bound.
type keyRange struct {
	lower page.Separator
	upper *page.Separator
}

// endsBefore reports whether the range ends at or before (key, t).
func (r *keyRange) endsBefore(key []byte, t keys.Trailer) bool {
	return r.upper != nil && r.upper.Compare(key, t) <= 0
}

// Covers reports whether (key, t) is in a skipped range.
func (s *Tree) Covers(key []byte, t keys.Trailer) bool {
	if s == nil {
		return false
	}
	i := s.find(key, t)
	return i < len(s.ranges) && s.ranges[i].lower.Compare(key, t) <= 0
}

// Mirrors reports whether a version of key goes into the repair tree and into its mirror.
func (s *Tree) Mirrors(key []byte, at keys.Epoch) bool {
	return s != nil && s.mirrored() && s.Covers(key, keys.MakeTrailer(at, keys.KindSet))
}

// find returns the index of the first range that does not end before (key, t).
func (s *Tree) find(key []byte, t keys.Trailer) int {
	i, _ := slices.BinarySearchFunc(s.ranges, 0, func(r keyRange, _ int) int {
		if r.endsBefore(key, t) {
			return -1
		}
		return 1
	})
	return i
}

// Get is btree.Get in the repair tree. A version that it does not have can only be in the tree.
func (s *Tree) Get(src btree.Source, key []byte, at keys.Epoch) (btree.Version, bool, error) {
	if !s.Covers(key, keys.MakeTrailer(at, 0xff)) {
		return btree.Version{}, false, nil
	}
	v, ok, err := btree.Get(src, s.root, key, at)
	if err != nil && pagesource.IsDamage(err) && !s.mirror.Empty() {
		return btree.Get(src, s.mirror, key, at)
	}
	return v, ok, err
}

// OtherBlob returns the blob with the same value that the other one of the repair tree and its mirror has for a version.
func (s *Tree) OtherBlob(src btree.Source, key []byte, at keys.Epoch, one page.Ref) (other page.Ref, ok bool) {
	for _, root := range []btree.Root{s.mirror, s.root} {
		v, found, err := btree.Get(src, root, key, at)
		if err != nil || !found || v.Epoch != at || !v.Large {
			continue
		}
		if other = page.RefOf(v.Value); other != one && blob.SameValue(other, one) {
			return other, true
		}
	}
	return page.Ref{}, false
}

// ChangedSince is btree.ChangedSince in the repair tree.
func (s *Tree) ChangedSince(src btree.Source, lower, upper []byte, after keys.Epoch) (bool, error) {
	if s == nil {
		return false, nil
	}
	changed, err := btree.ChangedSince(src, s.root, lower, upper, after)
	if err != nil && pagesource.IsDamage(err) && !s.mirror.Empty() {
		return btree.ChangedSince(src, s.mirror, lower, upper, after)
	}
	return changed, err
}

// Without abandons the repair tree or its mirror, whichever has this root, if the other one is left.
func (s *Tree) Without(root btree.Root) (next *Tree, ok bool) {
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

// Abandoned reports whether a tree was abandoned that the next merge frees.
func (s *Tree) Abandoned() bool { return s != nil && len(s.unused) > 0 }

// LacksMirror reports whether a repair tree has no mirror, because one of the two was abandoned or because it is from before
// there were mirrors. GiveBack builds both anew.
func (s *Tree) LacksMirror() bool { return s != nil && !s.mirrored() }

// mirrored reports whether a merge builds a mirror: a repair tree has one from its beginning or not at all.
func (s *Tree) mirrored() bool { return s.root.Empty() || !s.mirror.Empty() }

// With adds pages that a merge could not read. It reports false if all of them are known, with the same bounds or wider
// ones.
func (s *Tree) With(found []btree.UnreadablePage, checkpoint uint64) (*Tree, bool) {
	next := &Tree{}
	if s != nil {
		next.root, next.mirror, next.unused, next.pages = s.root, s.mirror, s.unused, slices.Clone(s.pages)
	}
	at, changed := make(map[page.ID]int, len(next.pages)+len(found)), false
	for i := range next.pages {
		at[next.pages[i].ID] = i
	}
	for i := range found {
		changed = next.add(&found[i], checkpoint, at) || changed
	}
	next.index()
	return next, changed
}

// add adds a page. at has the places of all pages.
func (s *Tree) add(f *btree.UnreadablePage, checkpoint uint64, at map[page.ID]int) (changed bool) {
	p := Page{
		ID: f.ID, Level: f.Level, Checkpoint: checkpoint, Lower: f.Lower, Upper: f.Upper, Reason: f.Err.Error(), unrecorded: true,
	}
	if damage, ok := errors.AsType[*pager.CorruptError](f.Err); ok {
		p.Reason = damage.Reason
	}
	p.Reason = p.Reason[:min(len(p.Reason), reasonMax)]
	i, known := at[p.ID]
	if !known {
		at[p.ID] = len(s.pages)
		s.pages = append(s.pages, p)
		return true
	}
	old := &s.pages[i] // it keeps its first reason
	if compareLower(p.Lower, old.Lower) >= 0 && compareUpper(p.Upper, old.Upper) <= 0 {
		return false
	}
	if compareLower(p.Lower, old.Lower) < 0 {
		old.Lower = p.Lower
	}
	if compareUpper(p.Upper, old.Upper) > 0 {
		old.Upper = p.Upper
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

// index derives avoid and ranges from the pages.
func (s *Tree) index() {
	slices.SortFunc(s.pages, func(a, b Page) int { return cmp.Or(compareLower(a.Lower, b.Lower), cmp.Compare(a.ID, b.ID)) })
	s.avoid, s.ranges = make(btree.Avoided, len(s.pages)), nil
	for i := range s.pages {
		p := &s.pages[i]
		s.avoid[p.ID] = p.Upper
		if n := len(s.ranges); n > 0 && !s.ranges[n-1].endsBefore(p.Lower.Key, p.Lower.Trailer) {
			if compareUpper(p.Upper, s.ranges[n-1].upper) > 0 {
				s.ranges[n-1].upper = p.Upper
			}
			continue
		}
		s.ranges = append(s.ranges, keyRange{p.Lower, p.Upper})
	}
}

// durable is the repair tree after its records were merged into the trees at root and mirror.
func (s *Tree) durable(root, mirror btree.Root) *Tree {
	next := &Tree{root: root, mirror: mirror, pages: slices.Clone(s.pages), avoid: maps.Clone(s.avoid), ranges: s.ranges}
	for i := range next.pages {
		next.pages[i].unrecorded = false
	}
	return next
}

// Roots are the roots of the repair tree and of its mirror.
func (s *Tree) Roots() (root, mirror btree.Root) {
	if s == nil {
		return btree.Root{}, btree.Root{}
	}
	return s.root, s.mirror
}

// records are the records that the repair tree does not have yet, as entries.
func (s *Tree) records(epoch keys.Epoch) (entries []btree.Entry) {
	for i := range s.pages {
		if p := &s.pages[i]; p.unrecorded {
			entries = append(entries, btree.Entry{Key: pageRecordKey(p.ID), Value: p.encode(), Trailer: keys.MakeTrailer(epoch, keys.KindSet)})
		}
	}
	slices.SortFunc(entries, func(a, b btree.Entry) int { return bytes.Compare(a.Key, b.Key) })
	return entries
}

// Read reads the records of a state. If the repair tree is damaged it reads the mirror.
func Read(p *pager.Reader, store *blob.Store, root, mirror btree.Root) (*Tree, error) {
	if root.Empty() {
		return nil, nil
	}
	s, err := readRecords(p, store, root)
	if err == nil {
		s.mirror = mirror
		return s, nil
	}
	if mirror.Empty() || !pagesource.IsDamage(err) {
		return nil, err
	}
	if s, again := readRecords(p, store, mirror); again == nil {
		s.unused = []btree.Root{root}
		return s, nil
	}
	return nil, err
}

// readRecords reads the records in the repair tree, or in its mirror.
func readRecords(p *pager.Reader, store *blob.Store, root btree.Root) (*Tree, error) {
	s := &Tree{root: root}
	var c btree.Cursor
	c.Reset(pagesource.WholeTree{Pager: p}, root, keys.MaxEpoch, []byte{byte(keys.SpaceRepairTree)}, []byte{byte(keys.SpaceRepairTree) + 1})
	for ok := c.First(); ok; ok = c.Next() {
		value := c.Version().Value
		if c.Version().Large {
			var err error
			if value, err = store.Append(nil, page.RefOf(value), store.Direct()); err != nil {
				return nil, err
			}
		}
		skipped, err := decodePageRecord(c.Key(), value)
		if err != nil {
			return nil, p.Corrupt(root.ID, err.Error())
		}
		s.pages = append(s.pages, skipped)
	}
	if c.Err() != nil {
		return nil, fmt.Errorf("the repair tree: %w", c.Err())
	}
	if len(s.pages) == 0 {
		return nil, p.Corrupt(root.ID, "a repair tree without a skipped page")
	}
	s.index()
	return s, nil
}

// Skipping returns source without the skipped pages: it refuses them as damaged, for the reason that is recorded.
func (s *Tree) Skipping(source btree.Source, p *pager.Reader) btree.Source {
	return pagesource.Skipping{Source: source, Refuse: func(id page.ID) error {
		if _, skipped := s.avoid[id]; !skipped {
			return nil
		}
		i := slices.IndexFunc(s.pages, func(q Page) bool { return q.ID == id })
		return p.Corrupt(id, s.pages[i].Reason)
	}}
}

// Pages are the skipped pages, in the order of their lower bounds; nil only without a repair tree. The caller does not change them.
func (s *Tree) Pages() []Page {
	if s == nil {
		return nil
	}
	return s.pages
}

// Avoid are the skipped pages. The caller does not change the map.
func (s *Tree) Avoid() btree.Avoided {
	if s == nil {
		return nil
	}
	return s.avoid
}

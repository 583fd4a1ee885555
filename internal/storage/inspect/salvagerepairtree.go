package inspect

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// readRepairTree passes on the versions in the repair tree: they are newer than the tree's versions
// of their keys, and older than the log's. Damaged pages of the repair tree may have had newer
// versions, too, so their keys in the ranges of skipped pages are not salvaged at all.
func (s *salvager) readRepairTree() error {
	root, mirror, err := s.state.RepairTreeRoots()
	if err != nil {
		s.lose(Damage{Kind: DamageSuperblock, File: s.state.Pages.Name(), Reason: err.Error()})
		return unlessDamage(s.ctx, err)
	}
	if root.Empty() {
		return nil
	}
	s.beside, s.besideSource = []btree.Root{root, mirror}, s.state.Source()
	s.skipped, err = s.state.RepairTree(s.blobs)
	if stop := unlessDamage(s.ctx, err); err != nil && stop != nil {
		return stop
	}
	if first, _ := s.skipped.Roots(); first == mirror && !first.Empty() { // the records in the other one cannot be read
		root, mirror = mirror, root
	}
	gaps, err := s.walkRepairTree(root, []gap{{}})
	if len(gaps) > 0 && err == nil && !mirror.Empty() {
		s.note("a page of the repair tree is damaged, and its mirror was read, too")
		var again []gap
		again, err = s.walkRepairTree(mirror, gaps)
		gaps = inBoth(gaps, again)
	}
	for _, g := range gaps {
		s.unsure = append(s.unsure, g.within(s.skipped.Pages())...)
	}
	return err
}

// isBeside reports whether the repair tree or its mirror has a version of a key.
func (s *salvager) isBeside(key []byte) (found bool, err error) {
	if s.skipped != nil && !s.skipped.Covers(key, keys.MakeTrailer(keys.MaxEpoch, 0xff)) {
		return false, nil
	}
	for _, root := range s.beside {
		_, found, err := btree.Get(s.besideSource, root, key, keys.MaxEpoch)
		if stop := unlessDamage(s.ctx, err); found || err != nil && stop != nil {
			return found, stop
		}
	}
	return false, nil
}

// inBoth is the intersection of two lists of gaps.
func inBoth(a, b []gap) (both []gap) {
	for _, g := range a {
		for _, h := range b {
			c := gap{g.lower, g.upper}
			if bytes.Compare(c.lower, h.lower) < 0 {
				c.lower = h.lower
			}
			if c.upper == nil || h.upper != nil && bytes.Compare(h.upper, c.upper) < 0 {
				c.upper = h.upper
			}
			if c.upper == nil || bytes.Compare(c.lower, c.upper) < 0 {
				both = append(both, c)
			}
		}
	}
	return both
}

// walkRepairTree passes on what can be read of the repair tree or of its mirror in these gaps, and
// returns those that are left.
func (s *salvager) walkRepairTree(root btree.Root, in []gap) (gaps []gap, err error) {
	s.decided = nil
	err = s.walkTree(root, &gaps, func(p page.Leaf) error {
		return s.eachNewest(p, func(key []byte, v *found) error {
			if other, ok := s.log[string(key)]; ok && other.epoch >= v.epoch || keys.SpaceOf(key) != keys.SpaceUser || !inGap(in, key) {
				return nil
			}
			value, f, ok, err := s.valueOf(key, []found{*v})
			if !ok {
				gaps = append(gaps, gap{bytes.Clone(key), append(bytes.Clone(key), 0)})
				return err
			}
			delete(s.log, string(key))
			if !v.kind.HasValue() {
				return nil
			}
			s.report.FromTree++
			return s.emit(key, value, v.epoch, &f)
		})
	})
	return gaps, err
}

// within is the part of a gap in the repair tree that skipped pages cover, rounded to whole keys.
// Without their records, which are in the repair tree as well, it is the whole gap.
func (g gap) within(skipped []storage.SkippedPage) (parts []gap) {
	if skipped == nil {
		return []gap{g}
	}
	for i := range skipped {
		p := &skipped[i]
		part := gap{p.Lower.Key, nil}
		if bytes.Compare(part.lower, g.lower) < 0 {
			part.lower = g.lower
		}
		if p.Upper != nil {
			part.upper = append(bytes.Clone(p.Upper.Key), 0)
		}
		if g.upper != nil && (part.upper == nil || bytes.Compare(g.upper, part.upper) < 0) {
			part.upper = g.upper
		}
		if part.upper == nil || bytes.Compare(part.lower, part.upper) < 0 {
			parts = append(parts, part)
		}
	}
	return parts
}

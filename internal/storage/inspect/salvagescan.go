package inspect

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"hash/maphash"
	"maps"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// foundLeaf is a leaf that no intact parent leads to.
type foundLeaf struct {
	id          page.ID
	checkpoint  uint64
	first, last []byte
	at          keys.Trailer        // of first
	versions    map[uint64]struct{} // hashes of its versions; nil before they are needed and afterwards
}

// scan reads the leaves that may be in the gaps. Ranges of leaves overlap: the versions of a key
// may continue in the next leaf, repair trees have leaves of their own, and without the allocation
// map replaced leaves are found, too. So a version is pending until no further leaf can have its
// key.
func (s *salvager) scan() error {
	leaves, repaired, err := s.findLeaves()
	if err != nil {
		return err
	}
	overrule := !repaired
	pending := map[string][]found{}
	var before []*foundLeaf // leaves that reach to the beginning of the current one
	buf := vfs.AlignedBuffer(s.state.Pages.PageSize())
	for i := range leaves {
		l := &leaves[i]
		if err := s.takeBefore(l.first, pending); err != nil {
			return err
		}
		var newer []*foundLeaf
		if overrule {
			before = slices.DeleteFunc(before, func(o *foundLeaf) bool {
				ended := bytes.Compare(o.last, l.first) < 0
				if ended {
					o.versions = nil
				}
				return ended
			})
			newer = slices.DeleteFunc(l.overruledBy(before, leaves[i+1:]), func(o *foundLeaf) bool { return !s.share(l, o, buf) })
			before = append(before, l)
		}
		if s.state.ReadPage(l.id, buf) == nil { // it was intact a moment ago
			s.addPending(buf, newer, pending)
		}
	}
	return s.takeBefore(nil, pending)
}

// findLeaves lists the intact leaves that the walk has not read, in key order; with the allocation
// map only those of the newest state. repaired reports whether leaves of repair trees can be among
// them.
//
// Where the newest state is known, pages of a newer checkpoint that was not finished, for instance
// of a bulk load that a crash ended, do not count as intact. The next checkpoint has the same number,
// and may leave such pages in the file. They have versions after the epoch of the state. Once a state has a later epoch than a bulk load
// that was refused or given up, leaves of that load are like others: the report says so.
func (s *salvager) findLeaves() (leaves []foundLeaf, repaired bool, err error) {
	err = s.eachPage(func(id page.ID, buf []byte) {
		if !page.IsTree(buf, 0) {
			return
		}
		v := page.Leaf(buf).Layout()
		l := foundLeaf{
			id: id, checkpoint: page.ReadHeader(buf).Checkpoint,
			first: slices.Concat(v.Prefix(), v.Suffix(0)), at: v.Trailer(0), last: slices.Concat(v.Prefix(), v.Suffix(v.Count()-1)),
		}
		repaired = repaired || keys.SpaceOf(l.first) == keys.SpaceRepairTree
		if s.reached.Has(int(id)) || s.mapped && !s.state.Pages.IsLive(id) || !s.raw() && newestOf(v) > s.report.Epoch {
			return
		}
		leaves = append(leaves, l)
	})
	slices.SortFunc(leaves, func(a, b foundLeaf) int { return cmp.Or(bytes.Compare(a.first, b.first), cmp.Compare(b.at, a.at)) })
	return leaves, repaired, err
}

// newestOf is the epoch of the newest version of a leaf.
func newestOf(v page.LeafLayout) (newest keys.Epoch) {
	for i := range v.Count() {
		newest = max(newest, v.Trailer(i).Epoch())
	}
	return newest
}

// addPending adds the newest versions of a leaf's keys that are in the gaps and that no newer leaf
// overrules. It adds each copy, because a repair tree and its mirror have values of their own, of
// which one may be damaged.
func (s *salvager) addPending(p page.Leaf, newer []*foundLeaf, pending map[string][]found) {
	s.decided = nil
	_ = s.eachNewest(p, func(key []byte, v *found) error {
		if !inGap(s.gaps, key) || covered(newer, key, v.epoch) {
			return nil
		}
		copies := pending[string(key)]
		if len(copies) > 0 && copies[0].epoch > v.epoch {
			return nil
		}
		if len(copies) > 0 && copies[0].epoch < v.epoch {
			copies = copies[:0]
		}
		pending[string(key)] = append(copies, found{v.epoch, v.kind, v.large, bytes.Clone(v.bytes)})
		return nil
	})
}

// takeBefore passes on what is pending for keys before the bound; nil is no bound.
func (s *salvager) takeBefore(bound []byte, pending map[string][]found) error {
	if s.ctx.Err() != nil {
		return s.ctx.Err()
	}
	for _, key := range slices.Sorted(maps.Keys(pending)) {
		if bound != nil && key >= string(bound) {
			return nil
		}
		if err := s.take([]byte(key), pending[key], &s.report.FromScan); err != nil {
			return err
		}
		delete(pending, key)
	}
	return nil
}

// overruledBy returns the leaves of newer checkpoints that share keys with l: of the leaves that
// begin before it, and after.
func (l *foundLeaf) overruledBy(before []*foundLeaf, after []foundLeaf) (newer []*foundLeaf) {
	for _, o := range before {
		if o.checkpoint > l.checkpoint {
			newer = append(newer, o)
		}
	}
	for i := range after {
		o := &after[i]
		if bytes.Compare(o.first, l.last) > 0 {
			break
		}
		if o.checkpoint > l.checkpoint {
			newer = append(newer, o)
		}
	}
	return newer
}

// share reports whether two leaves have a version in common. A leaf that replaces another one has the versions that were left of it;
// one that has none of them may be of a repair tree, with few keys of its range: no version is in the tree before the repair tree
// has given it back. If all versions of a leaf were replaced, deleted keys in it come back.
func (s *salvager) share(a, b *foundLeaf, buf []byte) bool {
	s.readVersions(a, buf)
	s.readVersions(b, buf)
	for version := range a.versions {
		if _, ok := b.versions[version]; ok {
			return true
		}
	}
	return false
}

// readVersions reads the versions of a leaf, unless it has them.
func (s *salvager) readVersions(l *foundLeaf, buf []byte) {
	if l.versions != nil {
		return
	}
	l.versions = map[uint64]struct{}{}
	if s.state.ReadPage(l.id, buf) != nil { // it was intact a moment ago
		return
	}
	view, key := page.Leaf(buf).Layout(), []byte(nil)
	for i := range view.Count() {
		suffix, t, _, _ := view.At(i)
		if i == 0 || len(suffix) > 0 {
			key = append(append(key[:0], view.Prefix()...), suffix...)
		}
		var h maphash.Hash
		h.SetSeed(versionSeed)
		_, _ = h.Write(key)
		_, _ = h.Write(binary.LittleEndian.AppendUint64(nil, uint64(t)))
		l.versions[h.Sum64()] = struct{}{}
	}
}

var versionSeed = maphash.MakeSeed()

// covered reports whether one of the leaves would have a version if the version still existed.
// Newer versions of the first key of a leaf may be in the leaf before it.
func covered(leaves []*foundLeaf, key []byte, epoch keys.Epoch) bool {
	for _, l := range leaves {
		first := bytes.Compare(l.first, key)
		if (first < 0 || first == 0 && epoch <= l.at.Epoch()) && bytes.Compare(key, l.last) <= 0 {
			return true
		}
	}
	return false
}

func inGap(gaps []gap, key []byte) bool {
	for _, g := range gaps {
		if (g.lower == nil || bytes.Compare(g.lower, key) <= 0) && (g.upper == nil || bytes.Compare(key, g.upper) < 0) {
			return true
		}
	}
	return false
}

package btree

import (
	"bytes"
	"cmp"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// partitionLeaves is how many neighbouring leaves make a partition. Smaller partitions balance
// better over the workers; but each may leave one leaf underfull at its end, and each takes its
// turn under the lock.
const partitionLeaves = 32

// planner walks the inner nodes of the base and divides the merge into partitions. The division
// depends on the base, the input and its cuts, not on the workers.
type planner struct {
	m      *merge
	src    Source
	in     peeker
	err    error
	events []event // since the last partition
	budget int     // pages that may still be relocated
	count  int     // partitions so far
	cuts   int     // index of the next of the merge's cuts
}

// event is something in the base that is between two partitions.
type event struct {
	child page.Child
	level int             // of the child
	bound *page.Separator // where the subtree ends; nil if that is not known
	freed bool            // the page is freed; else the subtree stays as it is
}

// partitions yields the partitions of the merge in key order. It stops early on an error.
func (pl *planner) partitions(yield func(*partition) bool) {
	base := pl.m.Base
	pl.in.seek(page.Separator{Trailer: page.NoTrailer})
	root := page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: base.ID}
	switch {
	case base.Empty():
		if pl.in.ok {
			pl.chunk([]page.Child{root}, nil, yield)
		}
	case base.Level == 0:
		pl.leaves([]page.Child{root}, nil, yield)
	case pl.touched(root, base.Level, nil):
		pl.node(root, base.Level, nil, yield)
	default:
		pl.events = append(pl.events, event{child: root, level: base.Level})
	}
	if pl.err == nil {
		pl.err = pl.in.in.Err()
	}
}

// node plans the subtree of an inner node whose keys are before bound.
func (pl *planner) node(c page.Child, level int, bound *page.Separator, yield func(*partition) bool) bool {
	children, err := pl.children(c, level, bound)
	if err != nil {
		return pl.skipUnreadable(c, level, bound, err)
	}
	if pl.relocatable(c.ID) {
		pl.budget--
	}
	pl.events = append(pl.events, event{child: c, level: level, freed: true})
	if level == 1 {
		return pl.leaves(children, bound, yield)
	}
	for i, c := range children {
		b := boundOf(children, i+1, bound)
		if !pl.touched(c, level-1, b) {
			pl.events = append(pl.events, event{child: c, level: level - 1, bound: b})
		} else if !pl.node(c, level-1, b, yield) {
			return false
		}
	}
	return pl.err == nil
}

// children reads an inner node that is to be rewritten, or takes the children of a rebuilt one.
func (pl *planner) children(c page.Child, level int, bound *page.Separator) ([]page.Child, error) {
	if r := pl.m.rebuilt(c.ID); r != nil {
		return r.Children, r.inside(&c, level, bound)
	}
	if pl.m.avoids(c.ID) {
		return nil, errAvoided
	}
	return pl.m.readInside(pl.src, c, level, bound)
}

// skipUnreadable leaves the inner node c, which cannot be read, where it is. It returns false for
// other errors.
func (pl *planner) skipUnreadable(c page.Child, level int, bound *page.Separator, err error) bool {
	if !pl.m.isUnreadable(err) {
		pl.err = err
		return false
	}
	pl.m.unreadablePages.add(UnreadablePage{ID: c.ID, Level: level, Lower: c.Separator, Upper: bound, Err: err})
	pl.in.skip(bound)
	pl.events = append(pl.events, event{child: c, level: level})
	return true
}

// boundOf is the separator of child i, or after for the last child.
func boundOf(children []page.Child, i int, after *page.Separator) *page.Separator {
	if i < len(children) {
		return &children[i].Separator
	}
	return after
}

// touched reports whether something below c is to be rewritten.
func (pl *planner) touched(c page.Child, level int, bound *page.Separator) bool {
	if level > 0 && pl.m.rebuildsBelow(&c, level, bound) {
		return true
	}
	if pl.m.avoids(c.ID) {
		return pl.in.before(bound)
	}
	if pl.in.before(bound) || pl.relocatable(c.ID) || pl.m.Policy.past(&c.Separator) || pl.m.Vacuum.Has(c.ID) || pl.m.mayExpire(&c, bound) {
		return true
	}
	if level == 0 || !pl.looks() {
		return false
	}
	children, err := readChildren(pl.src, c, level)
	if err != nil {
		if !pl.m.isUnreadable(err) {
			pl.err = err
		}
		return false // the node was read only to look for pages to relocate
	}
	for _, g := range children {
		if pl.relocatable(g.ID) || level > 1 && pl.relocates(g, level-1) {
			return true
		}
	}
	return false
}

// looks reports whether nodes are read only to look for pages to relocate. That may be all nodes.
func (pl *planner) looks() bool {
	if pl.budget > 0 && pl.m.Relocate.Enough != nil && pl.m.Relocate.Enough() {
		pl.budget = 0
	}
	if pl.budget > 0 && pl.err == nil {
		pl.err = pl.m.ctx.Err()
	}
	return pl.budget > 0 && pl.err == nil
}

// mayExpire reports whether the pages below c may have expired keys that the merge is to drop.
func (m *merge) mayExpire(c *page.Child, bound *page.Separator) bool {
	return m.DropExpired && m.Policy.Expired.meets(&c.Separator, bound)
}

// relocates reports whether something below c is to be relocated.
func (pl *planner) relocates(c page.Child, level int) bool {
	none := page.Separator{Trailer: page.NoTrailer} // no input is before it
	return pl.touched(c, level, &none)
}

func (pl *planner) relocatable(id page.ID) bool { return pl.budget > 0 && id >= pl.m.Relocate.From }

// leaves plans the children of a node of level 1.
func (pl *planner) leaves(children []page.Child, bound *page.Separator, yield func(*partition) bool) bool {
	for i := 0; i < len(children); i += partitionLeaves {
		j := min(i+partitionLeaves, len(children))
		run, b := children[i:j], boundOf(children, j, bound)
		if !pl.anyTouched(run, b) {
			for _, c := range run {
				pl.events = append(pl.events, event{child: c})
			}
		} else if !pl.chunk(run, b, yield) {
			return false
		}
	}
	return pl.err == nil
}

func (pl *planner) anyTouched(run []page.Child, bound *page.Separator) bool {
	for _, c := range run {
		if pl.touched(c, 0, bound) {
			return true
		}
	}
	return false
}

// chunk yields neighbouring leaves as one partition, or as several if there are cuts between or
// inside them.
func (pl *planner) chunk(run []page.Child, bound *page.Separator, yield func(*partition) bool) bool {
	relocate := false
	for _, c := range run {
		if pl.relocatable(c.ID) {
			relocate = true
			pl.budget--
		}
	}
	p := &partition{children: run, lo: run[0].Separator, end: bound, relocate: relocate}
	for _, k := range pl.cutsWithin(&p.lo, bound) {
		next := p.cut(page.Separator{Key: k, Trailer: page.NoTrailer})
		if !pl.yield(p, yield) {
			return false
		}
		p = next
	}
	p.hi = bound
	pl.in.skip(bound)
	return pl.yield(p, yield)
}

// cutsWithin returns the cuts after lo and before hi if there are enough of them. The planner is then past
// them.
func (pl *planner) cutsWithin(lo, hi *page.Separator) [][]byte {
	cuts := pl.m.cuts
	for pl.cuts < len(cuts) && lo.Compare(cuts[pl.cuts], page.NoTrailer) >= 0 {
		pl.cuts++
	}
	first := pl.cuts
	for pl.cuts < len(cuts) && (hi == nil || hi.Compare(cuts[pl.cuts], page.NoTrailer) > 0) {
		pl.cuts++
	}
	if pl.cuts-first < pl.m.Cuts.Least {
		return nil
	}
	return cuts[first:pl.cuts]
}

func (pl *planner) yield(p *partition, yield func(*partition) bool) bool {
	p.index, p.before, pl.events = pl.count, pl.events, nil
	pl.count++
	return yield(p)
}

// cut ends p at k and returns the rest.
func (p *partition) cut(k page.Separator) *partition {
	i := len(p.children) - 1
	for i > 0 && p.children[i].Compare(k.Key, k.Trailer) > 0 {
		i--
	}
	rest := &partition{children: p.children[i:], lo: k, end: p.end, relocate: p.relocate}
	rest.cutFirst = bytes.Compare(p.children[i].Key, k.Key) < 0 || p.children[i].Trailer != page.NoTrailer
	p.hi, p.cutLast = &rest.lo, rest.cutFirst
	if rest.cutFirst {
		i++
	}
	p.end, p.children = boundOf(p.children, i, p.end), p.children[:i]
	return rest
}

// readInside is readChildren for a node that is to be rewritten. One with separators of another place, or with children that were freed, as after
// a write that the device has lost, is damage, too.
func (m *merge) readInside(src Source, c page.Child, level int, bound *page.Separator) ([]page.Child, error) {
	children, err := readChildren(src, c, level)
	if err == nil {
		err = cmp.Or(childrenInside(children, &c.Separator, bound), m.checkLive(children))
	}
	return children, err
}

// checkLive checks that no child is a page that was freed.
func (m *merge) checkLive(children []page.Child) error {
	if m.IsLive == nil {
		return nil
	}
	for i := range children {
		if id := children[i].ID; !m.IsLive(id) {
			return fmt.Errorf("%w: child %d is page %d, which is not live", ErrStructure, i, id)
		}
	}
	return nil
}

// readChildren copies the children of an inner node, so that they outlive the page.
func readChildren(src Source, c page.Child, level int) ([]page.Child, error) {
	p, err := fetch(src, c.ID, level)
	if err != nil {
		return nil, err
	}
	node := page.Inner(p)
	n := node.Count()
	children := make([]page.Child, n)
	var seps arena
	var buf []byte
	for i := range n {
		children[i] = page.Child{Separator: c.Separator, ID: node.Child(i), Newest: node.Newest(i), DeadVersions: node.DeadVersions(i)}
		if i > 0 {
			s := node.Separator(buf[:0], i)
			buf = s.Key
			children[i].Separator = page.Separator{Key: seps.copy(s.Key), Trailer: s.Trailer}
		}
	}
	return children, nil
}

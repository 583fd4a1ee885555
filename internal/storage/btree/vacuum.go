package btree

import (
	"bytes"
	"context"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// A merge drops dead versions from the leaves that it rewrites for new versions. Two kinds of dead
// versions stay in other leaves: those that a snapshot needed when the leaf was last rewritten, and
// those that a bulk load replaced. Vacuum finds them. Every inner node has the dead-version ratio
// of each child, so the search descends only to leaves with superseded versions or tombstones, and
// reads those leaves. A merge then rewrites the leaves from which something can be dropped.

// VacuumSearch looks for leaves from which something can be dropped.
type VacuumSearch struct {
	Policy Policy
	From   page.Separator // where to begin; the zero Separator is the first leaf
	Max    int            // leaves to read at most, those included that cannot be read
	Avoid  Avoided        // pages that a merge skips, with all pages below them
	// Damaged is called with the error of a page that cannot be read. If it returns nil, the search
	// skips the page.
	Damaged func(error) error
}

// DeadVersions is what a search found.
type DeadVersions struct {
	Leaves   int             // leaves from which something can be dropped
	Versions int             // versions that can be dropped
	Read     int             // leaves that were read, or could not be
	Next     *page.Separator // where the next search begins; nil if this one reached the end

	pages map[page.ID]struct{} // the leaves with dead versions, and the inner nodes above them
}

// Empty reports whether no leaf has to be rewritten.
func (g *DeadVersions) Empty() bool { return g == nil || g.Leaves == 0 }

// Has reports whether page id has to be rewritten.
func (g *DeadVersions) Has(id page.ID) bool {
	if g == nil {
		return false
	}
	_, ok := g.pages[id]
	return ok
}

// Find reads the leaves of a tree that have superseded versions or tombstones, in key order. It ends with ctx, between two pages.
func (s *VacuumSearch) Find(ctx context.Context, src Source, root Root) (*DeadVersions, error) {
	f := vacuumFinder{VacuumSearch: s, ctx: ctx, src: src, found: &DeadVersions{pages: map[page.ID]struct{}{}}}
	if root.Empty() {
		return f.found, nil
	}
	top := page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: root.ID}
	_, err := f.visit(&top, root.Level)
	return f.found, err
}

// DeadVersionRatio is the dead-version ratio of a whole tree.
func DeadVersionRatio(src Source, root Root) (page.DeadRatio, error) {
	if root.Empty() {
		return 0, nil
	}
	p, err := fetch(src, root.ID, root.Level)
	if err != nil {
		return 0, err
	}
	return ratioOf(p, root.Level, &page.Separator{Trailer: page.NoTrailer}), nil
}

// ratioOf computes the dead-version ratio of a page whose lower bound is s.
func ratioOf(p []byte, level int, s *page.Separator) page.DeadRatio {
	if level > 0 {
		return page.Inner(p).DeadVersionRatio()
	}
	return page.Leaf(p).DeadVersionRatio(continuesKey(p, s))
}

// continuesKey reports whether the first entry of a leaf is an older version of a key that the leaf
// before it has, too. A separator with a trailer says so, unless the versions of that key are gone
// on one side.
func continuesKey(p page.Leaf, s *page.Separator) bool {
	if s.Trailer == page.NoTrailer {
		return false
	}
	v := p.Layout()
	prefix, suffix := v.Prefix(), v.Suffix(0)
	return len(s.Key) == len(prefix)+len(suffix) && bytes.HasPrefix(s.Key, prefix) && bytes.HasSuffix(s.Key, suffix)
}

type vacuumFinder struct {
	*VacuumSearch
	ctx   context.Context // of the search
	src   Source
	found *DeadVersions
}

// visit searches the subtree of c and reports whether c has to be rewritten.
func (f *vacuumFinder) visit(c *page.Child, level int) (hit bool, err error) {
	if err := f.ctx.Err(); err != nil {
		return false, err
	}
	if level == 0 {
		hit, err = f.leaf(c)
	} else {
		hit, err = f.node(c, level)
	}
	if hit {
		f.found.pages[c.ID] = struct{}{}
	}
	return hit, err
}

func (f *vacuumFinder) node(c *page.Child, level int) (hit bool, err error) {
	children, err := readChildren(f.src, *c, level)
	if err != nil {
		return false, f.Damaged(err)
	}
	for i := range children {
		g := &children[i]
		if g.DeadVersions == 0 || i+1 < len(children) && children[i+1].Compare(f.From.Key, f.From.Trailer) <= 0 {
			continue
		}
		if _, avoid := f.Avoid[g.ID]; avoid {
			continue
		}
		if f.found.Next != nil {
			break
		}
		below, err := f.visit(g, level-1)
		if err != nil {
			return false, err
		}
		hit = hit || below
	}
	return hit, nil
}

func (f *vacuumFinder) leaf(c *page.Child) (hit bool, err error) {
	if f.found.Read == f.Max {
		f.found.Next = &page.Separator{Key: bytes.Clone(c.Key), Trailer: c.Trailer}
		return false, nil
	}
	f.found.Read++
	p, err := fetch(f.src, c.ID, 0)
	if err != nil {
		return false, f.Damaged(err)
	}
	n := f.Policy.droppable(p, &c.Separator)
	if n > 0 {
		f.found.Leaves++
		f.found.Versions += n
	}
	return n > 0, nil
}

// spaceIn is the begin of the key of entry i: its keyspace at least.
func spaceIn(v *page.LeafLayout, i int) []byte {
	if prefix := v.Prefix(); len(prefix) > 0 {
		return prefix
	}
	return v.Suffix(i)
}

// droppable is how many entries of a leaf a merge would drop. worker.emit decides by the same rule.
func (p *Policy) droppable(leaf page.Leaf, lower *page.Separator) (n int) {
	v := leaf.Layout()
	if v.Count() == 0 {
		return 0
	}
	h := p.begin(spaceIn(&v, 0))
	if continuesKey(leaf, lower) {
		h = p.historyAfter(lower)
	}
	for i := range v.Count() {
		if i > 0 && !v.Same(i) {
			h = p.begin(spaceIn(&v, i))
		}
		t := v.Trailer(i)
		if !p.retains(&h, t.Epoch()) || t.Kind() == keys.KindDelete && h.done && !p.RetainTombstones {
			n++
		}
	}
	return n
}

package btree

import (
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Visitor sees the pages of a tree, parents before children, in key order.
type Visitor struct {
	// Page is called for each reachable page, but for leaves that do not fit their parent. Its bytes are valid until Page returns.
	Page func(id page.ID, level int, p []byte) error
	// Damaged is called for each page that cannot be read or does not fit its parent, with the
	// range of keys that it may hold, from lo up to hi; nil means no bound. If it returns nil, the
	// walk skips the page. A nil Damaged ends the walk with the error.
	Damaged func(id page.ID, level int, lo, hi *page.Separator, err error) error
}

// Walk visits every page of a tree and checks how the pages fit together: types and levels, keys
// inside their separators, and newest epochs inside the bounds of their parents. page.Verify checks
// what concerns one page alone.
func Walk(src Source, root Root, v *Visitor) error {
	if root.Empty() {
		return nil
	}
	if root.Level > page.LevelMax {
		return fmt.Errorf("%w: root at level %d", ErrStructure, root.Level)
	}
	w := walker{src: src, v: v}
	c := page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: root.ID, Newest: keys.MaxEpoch}
	return w.visit(&c, root.Level, nil, nil)
}

type walker struct {
	src Source
	v   *Visitor
}

// visit checks the subtree of c, whose keys must be in [lo, hi).
func (w *walker) visit(c *page.Child, level int, lo, hi *page.Separator) error {
	children, err := w.enter(c, level, lo, hi)
	if err != nil {
		err = fmt.Errorf("page %d at level %d: %w", c.ID, level, err)
		if w.v.Damaged == nil {
			return err
		}
		return w.v.Damaged(c.ID, level, lo, hi, err)
	}
	for i := range children {
		below := lo
		if i > 0 {
			below = &children[i].Separator
		}
		if err := w.visit(&children[i], level-1, below, boundOf(children, i+1, hi)); err != nil {
			return err
		}
	}
	return nil
}

// enter checks one page and returns its children.
func (w *walker) enter(c *page.Child, level int, lo, hi *page.Separator) ([]page.Child, error) {
	p, err := fetch(w.src, c.ID, level)
	if err != nil {
		return nil, err
	}
	if n := page.ReadHeader(p).Newest; n > c.Newest {
		return nil, fmt.Errorf("%w: newest epoch %d is larger than %d in the parent", ErrStructure, n, c.Newest)
	}
	if ratio := ratioOf(p, level, &c.Separator); c.DeadVersions != 0 && ratio != c.DeadVersions {
		return nil, fmt.Errorf("%w: dead-version ratio %d differs from %d in the parent", ErrStructure, ratio, c.DeadVersions)
	}
	if level == 0 {
		if err := LeafInside(p, lo, hi, nil); err != nil {
			return nil, err
		}
	}
	if w.v.Page != nil {
		if err := w.v.Page(c.ID, level, p); err != nil {
			return nil, err
		}
	}
	if level == 0 {
		return nil, nil
	}
	children, err := readChildren(w.src, *c, level)
	if err != nil {
		return nil, err
	}
	return children, childrenInside(children, lo, hi)
}

// childrenInside checks that the separators between the children of a node, which ascend, are in (lo, hi).
func childrenInside(children []page.Child, lo, hi *page.Separator) error {
	if len(children) < 2 {
		return nil
	}
	return separatorsInside(&children[1].Separator, &children[len(children)-1].Separator, lo, hi)
}

func separatorsInside(first, last, lo, hi *page.Separator) error {
	if lo != nil && lo.Compare(first.Key, first.Trailer) >= 0 || hi != nil && hi.Compare(last.Key, last.Trailer) <= 0 {
		return fmt.Errorf("%w: separators from %v to %v outside [%v, %v)", ErrStructure, first, last, lo, hi)
	}
	return nil
}

// Inside checks that a page is a tree page of this level with entries in [lo, hi), or separators in (lo, hi).
func Inside(p []byte, level int, lo, hi *page.Separator) error {
	if !page.IsTree(p, level) {
		return fmt.Errorf("%w: not a tree page of level %d", ErrStructure, level)
	}
	if level == 0 {
		return LeafInside(p, lo, hi, nil)
	}
	node := page.Inner(p)
	last := node.Count() - 1
	if last < 1 {
		return nil
	}
	from, to := node.Separator(nil, 1), node.Separator(nil, last)
	return separatorsInside(&from, &to, lo, hi)
}

// LeafInside checks that the entries of a leaf are in [lo, hi). buf is for a key.
func LeafInside(p page.Leaf, lo, hi *page.Separator, buf []byte) error {
	v := p.Layout()
	last := v.Count() - 1
	first := append(append(buf[:0], v.Prefix()...), v.Suffix(0)...)
	if lo != nil && lo.Compare(first, v.Trailer(0)) > 0 {
		return fmt.Errorf("%w: first key %q before the lower bound %v", ErrStructure, first, lo)
	}
	end := append(first[:len(v.Prefix())], v.Suffix(last)...)
	if hi != nil && hi.Compare(end, v.Trailer(last)) <= 0 {
		return fmt.Errorf("%w: last key %q not before the upper bound %v", ErrStructure, end, hi)
	}
	return nil
}

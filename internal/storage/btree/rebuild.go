package btree

import (
	"bytes"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// RebuiltNode is an inner node of the base that cannot be read, and the children that it had. A merge
// that is given one replaces the page: it reads the children from here, and frees the page.
type RebuiltNode struct {
	ID       page.ID
	Level    int
	Children []page.Child // in key order; the separator of the first one is the lower bound of the node
}

// rebuilt is the rebuilt node that replaces page id, or nil.
func (m *merge) rebuilt(id page.ID) *RebuiltNode {
	for i := range m.Rebuilt {
		if m.Rebuilt[i].ID == id {
			return &m.Rebuilt[i]
		}
	}
	return nil
}

// rebuildsBelow reports whether c, which is at the given level and before bound, is replaced by a
// rebuilt node or has one below it. The lower bound of a node never changes while it is in the tree.
func (m *merge) rebuildsBelow(c *page.Child, level int, bound *page.Separator) bool {
	for i := range m.Rebuilt {
		r := &m.Rebuilt[i]
		lower := &r.Children[0].Separator
		if r.Level <= level && c.Compare(lower.Key, lower.Trailer) <= 0 && (bound == nil || bound.Compare(lower.Key, lower.Trailer) > 0) {
			return true
		}
	}
	return false
}

// inside checks that the children of a rebuilt node fit between the bounds that its parent has now.
func (r *RebuiltNode) inside(c *page.Child, level int, bound *page.Separator) error {
	lower, last := &r.Children[0].Separator, &r.Children[len(r.Children)-1].Separator
	if r.Level != level || c.Compare(lower.Key, lower.Trailer) != 0 || bound != nil && bound.Compare(last.Key, last.Trailer) <= 0 {
		return fmt.Errorf("%w: rebuilt node %d of level %d from %v to %v is at level %d, from %v to %v", ErrStructure, r.ID, r.Level, lower, last, level, c.Separator, bound)
	}
	return nil
}

// Children reads the children of an inner node. The separator of the first one is that of c.
func Children(src Source, c *page.Child, level int) ([]page.Child, error) {
	return readChildren(src, *c, level)
}

// Between is the separator between two neighbouring versions in different leaves.
func Between(left []byte, t keys.Trailer, right []byte) page.Separator {
	if bytes.Equal(left, right) {
		return page.Separator{Key: right, Trailer: t - 1}
	}
	return page.Separator{Key: page.Shortest(left, right), Trailer: page.NoTrailer}
}

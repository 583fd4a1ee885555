package btree

import (
	"slices"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// upper builds the inner nodes above a stream of subtrees that come in key order: new leaves, and
// subtrees of the base that stay. Each level keeps up to two unwritten nodes, as leafPacker does
// for leaves.
type upper struct {
	m      *merge
	o      *ordered
	src    Source
	levels [page.LevelMax + 2]nodePacker // by level of the unwritten node; levels[0] is unused
}

type nodePacker struct {
	regions   [2]nodeRegion
	second    bool
	lastFresh bool // the last child was written by this merge and cannot be read back
}

type nodeRegion struct {
	children []page.Child
	size     page.InnerSize
}

func (r *nodeRegion) reset() { r.children, r.size = r.children[:0], page.InnerSize{} }

func (r *nodeRegion) add(c page.Child) {
	r.size.Add(&c)
	r.children = append(r.children, c)
}

func (k *nodePacker) empty() bool { return len(k.regions[0].children) == 0 }

// put takes the next subtree, whose root is at the given level, and whose keys are before bound. Unwritten nodes below that level
// end here. An underfull one takes in its right neighbour instead, which is then the first node of
// the subtree at that level.
func (u *upper) put(c page.Child, level int, fresh bool, bound *page.Separator) error {
	for j := 1; j <= level; j++ {
		if u.underfull(j) {
			if children, err := u.children(c, level, bound); children != nil || err != nil {
				return u.open(c, level, children, bound, err)
			}
		}
		if err := u.flush(j); err != nil {
			return err
		}
	}
	return u.add(level+1, c, fresh)
}

func (u *upper) underfull(level int) bool {
	k := &u.levels[level]
	return !k.second && !k.empty() && k.regions[0].size.Bytes() < leastBytes(u.m.PageSize)
}

// open dissolves an inner node of the base and puts its children.
func (u *upper) open(c page.Child, level int, children []page.Child, bound *page.Separator, err error) error {
	if err != nil {
		return err
	}
	u.o.result.Freed = append(u.o.result.Freed, c.ID)
	for i, g := range children {
		if err := u.put(g, level-1, false, boundOf(children, i+1, bound)); err != nil {
			return err
		}
	}
	return nil
}

// children reads an inner node of the base so that an underfull neighbour can take in its children.
// It returns nil if the node must stay or cannot be read.
func (u *upper) children(c page.Child, level int, bound *page.Separator) ([]page.Child, error) {
	if u.m.avoids(c.ID) {
		return nil, nil
	}
	children, err := u.m.readInside(u.src, c, level, bound)
	if u.m.isUnreadable(err) {
		return nil, nil
	}
	return children, err
}

// add gives the unwritten node at level another child.
func (u *upper) add(level int, c page.Child, fresh bool) error {
	k := &u.levels[level]
	k.lastFresh = fresh
	r := &k.regions[0]
	if k.second {
		r = &k.regions[1]
	}
	if len(r.children) > 1 && r.size.With(&c) > u.m.soft {
		if k.second {
			if err := u.emit(level, k.regions[0].children); err != nil {
				return err
			}
			k.regions[0], k.regions[1] = k.regions[1], k.regions[0]
		}
		k.second = true
		r = &k.regions[1]
		r.reset()
	}
	if err := r.checkChild(level, &c); err != nil {
		return err
	}
	r.add(c)
	return nil
}

// flush ends the unwritten nodes at level: they become one node or two, children of the next level.
func (u *upper) flush(level int) error {
	k := &u.levels[level]
	if k.empty() {
		return nil
	}
	if k.second {
		u.balance(k)
	}
	if err := u.emit(level, k.regions[0].children); err != nil {
		return err
	}
	if k.second {
		if err := u.emit(level, k.regions[1].children); err != nil {
			return err
		}
	}
	k.regions[0].reset()
	k.second = false
	return nil
}

// balance divides the last two nodes of a run evenly if the second would be underfull.
func (u *upper) balance(k *nodePacker) {
	a, b := &k.regions[0], &k.regions[1]
	payload := page.Payload(u.m.PageSize)
	if b.size.Bytes() >= leastBytes(u.m.PageSize) {
		return
	}
	all := append(a.children, b.children...)
	cut := len(all)
	if !nodeFits(all, payload) {
		// The cut is not after the first node's end: that node may have few children with long
		// separators, and the second many with short ones.
		for cut = min(len(all)/2, len(a.children)); cut < len(a.children) && !nodeFits(all[cut:], payload); {
			cut++
		}
	}
	a.children, k.second = all[:cut], cut < len(all)
	b.children = append(b.children[:0], all[cut:]...)
}

func nodeFits(children []page.Child, payload int) bool {
	var s page.InnerSize
	for i := range children {
		s.Add(&children[i])
	}
	return s.Bytes() <= payload
}

// emit writes an inner node and gives it to the level above.
func (u *upper) emit(level int, children []page.Child) error {
	id, err := u.o.allocLocked()
	if err != nil {
		return err
	}
	p := make([]byte, u.m.PageSize)
	newest := page.BuildInner(p, u.m.Checkpoint, level, children)
	if err := checkNode(p, children); err != nil {
		return err
	}
	page.SetID(p, id)
	if err := u.m.writePage(id, 0, p); err != nil {
		return err
	}
	u.o.result.Stats.InnerPages++
	ratio := page.Inner(p).DeadVersionRatio()
	return u.add(level+1, page.Child{Separator: children[0].Separator, ID: id, Newest: newest, DeadVersions: ratio}, true)
}

// finish closes all levels and returns the root: the only child of a node that has no others is the
// root itself.
func (u *upper) finish() (Root, error) {
	top := 0
	for j := range u.levels {
		if !u.levels[j].empty() {
			top = j
		}
	}
	for j := 1; j <= top; j++ {
		k := &u.levels[j]
		if k.empty() {
			continue
		}
		if j == top && !k.second && len(k.regions[0].children) == 1 {
			return Root{ID: k.regions[0].children[0].ID, Level: j - 1}, nil
		}
		if err := u.joinPrevious(j); err != nil {
			return Root{}, err
		}
		if err := u.flush(j); err != nil {
			return Root{}, err
		}
		if j == top {
			top++ // flush has given it a child
		}
	}
	return Root{}, nil
}

// joinPrevious lets an underfull last node at level take in its left neighbour, if that is a node
// of the base.
func (u *upper) joinPrevious(level int) error {
	k, parent := &u.levels[level], &u.levels[level+1]
	if !u.underfull(level) || parent.empty() || parent.lastFresh {
		return nil
	}
	r := &parent.regions[0]
	if parent.second {
		r = &parent.regions[1]
	}
	prev := r.children[len(r.children)-1]
	children, err := u.children(prev, level, &k.regions[0].children[0].Separator)
	if children == nil {
		return err
	}
	u.o.result.Freed = append(u.o.result.Freed, prev.ID)
	rest := slices.Clone(r.children[:len(r.children)-1])
	r.reset()
	for _, c := range rest {
		r.add(c)
	}
	if len(rest) == 0 && parent.second {
		parent.second = false
	}
	tail := slices.Clone(k.regions[0].children)
	k.regions[0].reset()
	for _, c := range append(children, tail...) {
		if err := u.add(level, c, true); err != nil {
			return err
		}
	}
	return nil
}

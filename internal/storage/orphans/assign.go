package orphans

import (
	"slices"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// assign finds the parent of every top. It fails if one of them has none or could have several.
func (f *finder) assign() error {
	var open []*lostNode // lost nodes whose remains say nothing
	for _, n := range slices.Concat(f.lost, f.hidden) {
		nodes, err := f.assignByRemains(n)
		if err != nil {
			return err
		}
		open = append(open, nodes...)
	}
	return f.assignOpen(open)
}

// assignOpen gives the tops that are left to the lost nodes whose remains say nothing.
func (f *finder) assignOpen(open []*lostNode) error {
	if len(open) > 0 {
		if err := f.assignUnread(open); err != nil {
			return err
		}
		if err := f.assignByKeys(open); err != nil {
			return err
		}
	}
	for id, t := range f.tops {
		if !t.assigned {
			return unproved("page %d is live, and no lost node is known to have it", id)
		}
	}
	return nil
}

// assignByRemains gives a lost node the children that its remains name, if they are all tops, and the nodes among them
// that cannot be read theirs. It returns the nodes that got none.
func (f *finder) assignByRemains(n *lostNode) (open []*lostNode, err error) {
	err = f.read(n.id)
	if err != nil && !pagesource.IsDamage(err) {
		return nil, err
	}
	exact := err == nil || page.CorrectBit(f.buf, n.id)
	r, ok := page.InnerRemains(f.buf, n.id)
	if !ok || r.Level != n.level || !f.areTops(r.Children, n.level-1) {
		return []*lostNode{n}, nil
	}
	if n.ordered = true; exact {
		n.separators = r.Separators
	}
	for _, id := range r.Children {
		t := f.tops[id]
		t.assigned = true
		n.children = append(n.children, t)
	}
	for _, t := range n.children {
		if t.readable() || n.level == 1 {
			continue
		}
		t.node = &lostNode{id: t.id, level: n.level - 1, newest: n.newest}
		below, err := f.assignByRemains(t.node)
		if err != nil {
			return nil, err
		}
		open = append(open, below...)
	}
	return open, nil
}

// areTops reports whether ids are different tops of this level, which no other lost node has.
func (f *finder) areTops(ids []page.ID, level int) bool {
	seen := map[page.ID]struct{}{}
	for _, id := range ids {
		t := f.tops[id]
		if _, twice := seen[id]; twice || t == nil || t.assigned || t.readable() && t.level != level {
			return false
		}
		seen[id] = struct{}{}
	}
	return true
}

// assignUnread gives the only unreadable top its place if it is an inner node: leaves without a parent, or nodes, two
// levels below a lost node prove that there is a node between. Others could be anywhere.
func (f *finder) assignUnread(open []*lostNode) error {
	var unread []*top
	for _, t := range f.tops {
		if !t.readable() && !t.assigned {
			unread = append(unread, t)
		}
	}
	if len(unread) == 0 {
		return nil
	}
	for _, n := range open {
		if len(unread) > 1 || n.level < 2 || n.lower == nil {
			continue
		}
		node := &lostNode{id: unread[0].id, level: n.level - 1, newest: n.newest}
		for _, t := range f.tops {
			if t.readable() && !t.assigned && t.level == n.level-2 && n.has(t) {
				t.assigned = true
				node.children = append(node.children, t)
			}
		}
		if len(node.children) > 0 {
			unread[0].assigned, unread[0].node = true, node
			n.children = append(n.children, unread[0])
			return nil
		}
	}
	return unproved("page %d has no parent and cannot be read, so that its place is not known", unread[0].id)
}

// assignByKeys gives the tops that are left to the lost nodes whose ranges they are in.
func (f *finder) assignByKeys(open []*lostNode) error {
	for _, n := range open {
		if n.lower == nil && slices.ContainsFunc(open, func(o *lostNode) bool { return o != n && o.level == n.level }) {
			return unproved("several nodes cannot be read, and nothing says which keys node %d had", n.id)
		}
		for _, t := range f.tops {
			if t.readable() && !t.assigned && t.level == n.level-1 && (n.lower == nil || n.has(t)) {
				t.assigned = true
				n.children = append(n.children, t)
			}
		}
		if len(n.children) == 0 {
			return unproved("no page is known that node %d had", n.id)
		}
	}
	return nil
}

// has reports whether t is in the range of n.
func (n *lostNode) has(t *top) bool {
	s := t.inside
	return s != nil && n.lower.Compare(s.Key, s.Trailer) <= 0 && (n.upper == nil || n.upper.Compare(s.Key, s.Trailer) > 0)
}

// arrange sorts the children of a lost node, and computes their separators. It checks that they are inside the node's range.
func (f *finder) arrange(n *lostNode) error {
	for _, t := range n.children {
		if t.node != nil {
			if err := t.takeEnds(); err != nil {
				return err
			}
		}
	}
	if err := n.sort(); err != nil {
		return err
	}
	return n.separate(n.lower, n.upper)
}

// takeEnds gives a lost node that is a child of another one the ends of its own children.
func (t *top) takeEnds() error {
	for _, c := range t.node.children {
		if c.node != nil {
			if err := c.takeEnds(); err != nil {
				return err
			}
		}
	}
	if err := t.node.sort(); err != nil {
		return err
	}
	children := t.node.children
	t.first, t.last, t.inside = children[0].first, children[len(children)-1].last, nil
	for _, c := range children {
		if t.inside == nil {
			t.inside = c.inside
		}
	}
	return nil
}

// sort brings the children into key order. If they are in the order of the remains, it checks that order.
func (n *lostNode) sort() error {
	byKey := func(a, b *top) int { return a.inside.Compare(b.inside.Key, b.inside.Trailer) }
	if !n.ordered {
		if slices.ContainsFunc(n.children, func(t *top) bool { return t.inside == nil }) {
			return unproved("node %d has children of which no key is known", n.id)
		}
		slices.SortFunc(n.children, byKey)
		return nil
	}
	var last *top
	for _, t := range n.children {
		if t.inside == nil {
			continue
		}
		if last != nil && byKey(last, t) >= 0 {
			return unproved("the remains of node %d name its children out of order", n.id)
		}
		last = t
	}
	return nil
}

// separate computes what the node had about its children, and the same for the lost nodes among these.
func (n *lostNode) separate(lower, upper *page.Separator) error {
	first, last := n.children[0], n.children[len(n.children)-1]
	if first.first != nil && lower.Compare(first.first.key, first.first.trailer) > 0 {
		return unproved("page %d begins before the range of node %d", first.id, n.id)
	}
	if last.last != nil && upper != nil && upper.Compare(last.last.key, last.last.trailer) <= 0 {
		return unproved("page %d ends after the range of node %d", last.id, n.id)
	}
	n.rebuilt = make([]page.Child, 0, len(n.children))
	bound := *lower
	for i, t := range n.children {
		if i > 0 {
			var exact *page.Separator
			if n.separators != nil {
				exact = &n.separators[i]
			}
			next, err := between(n.children[i-1], t, exact)
			if err != nil {
				return err
			}
			if bound.Compare(next.Key, next.Trailer) >= 0 || upper != nil && upper.Compare(next.Key, next.Trailer) <= 0 {
				return unproved("the children of node %d do not ascend", n.id)
			}
			bound = next
		}
		n.rebuilt = append(n.rebuilt, t.child(bound, n.newest))
	}
	return n.separateBelow(upper)
}

// separateBelow does so for the lost nodes among the children.
func (n *lostNode) separateBelow(upper *page.Separator) error {
	for i, t := range n.children {
		if t.node == nil {
			continue
		}
		end := upper
		if i+1 < len(n.children) {
			end = &n.rebuilt[i+1].Separator
		}
		if err := t.node.separate(&n.rebuilt[i].Separator, end); err != nil {
			return err
		}
	}
	return nil
}

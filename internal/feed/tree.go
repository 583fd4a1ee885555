package feed

import (
	"bytes"
	"cmp"
	"math/rand/v2"
)

// tree has the ranges that watches of a class have: an interval tree. It is sorted by the lower bounds, then by the upper bounds, and each
// range knows where the last of itself and those below it ends. So a search passes by all ranges below that end before a key, and for a commit
// of k keys, of which m ranges have one, it looks at O((k + m) log n) of n ranges.
//
// Invariants, of each node:
//   - those on its left are before it, those on its right after it;
//   - none below it has a higher rank. Ranks are random, so that the tree is as deep as one of ranges that come in a random order, O(log n),
//     whatever ranges a client chooses, and in which order (a treap);
//   - last is the largest upper bound of its own and those below, and the same memory as that one; lastLive is that of those that live
//     watches have.
type tree struct {
	class
	root *node
}

// node is a range, with the watches that have it.
type node struct {
	Range
	lastLive, last  []byte // lastLive is nil without a live watch
	left, right, up *node
	rank            uint32
	holders
}

// node returns the node of a range, a new one if there is none.
func (t *tree) node(r Range) *node {
	var up *node
	at := &t.root
	for *at != nil {
		up = *at
		switch order := r.compare(&up.Range); {
		case order == 0:
			return up
		case order < 0:
			at = &up.left
		default:
			at = &up.right
		}
	}
	n := &node{Range: r, last: r.Upper, up: up, rank: rand.Uint32(), holders: holders{class: t.class}} //nolint:gosec // a client cannot see it
	n.holders.node = n
	*at = n
	for ; up != nil && bytes.Compare(up.last, n.Upper) < 0; up = up.up {
		up.last = n.Upper
	}
	for n.up != nil && n.up.rank < n.rank {
		t.raise(n)
	}
	return n
}

// remove takes out a node that no live watch has. The nodes above keep no memory of it: their bounds may be equal to its own and still not be
// of it, and so all of these are found out again.
func (t *tree) remove(n *node) {
	for n.left != nil && n.right != nil {
		if n.left.rank > n.right.rank {
			t.raise(n.left)
		} else {
			t.raise(n.right)
		}
	}
	t.replace(n, cmp.Or(n.left, n.right))
	for up := n.up; up != nil && bytes.Equal(up.last, n.Upper); up = up.up {
		up.sum()
	}
}

// raise puts a node into the place of the one above it, which comes below it (a rotation).
func (t *tree) raise(n *node) {
	up := n.up
	t.replace(up, n)
	from, to := &up.left, &n.right
	if up.right == n {
		from, to = &up.right, &n.left
	}
	if *from = *to; *to != nil {
		(*to).up = up
	}
	*to, up.up = up, n
	n.last, n.lastLive = up.last, up.lastLive
	up.sum()
}

// replace gives the place of a node below the one above it to another, or to none.
func (t *tree) replace(n, by *node) {
	switch {
	case n.up == nil:
		t.root = by
	case n.up.left == n:
		n.up.left = by
	default:
		n.up.right = by
	}
	if by != nil {
		by.up = n.up
	}
}

// promote says that a node has a live watch, and demote that it has none any more.
func (n *node) promote() {
	for at := n; at != nil && bytes.Compare(at.lastLive, n.Upper) < 0; at = at.up {
		at.lastLive = n.Upper
	}
}

func (n *node) demote() {
	for at := n; at != nil && bytes.Equal(at.lastLive, n.Upper); at = at.up {
		at.sum()
	}
}

// sum finds out again which of a node and those below it ends last.
func (n *node) sum() {
	n.last, n.lastLive = n.Upper, nil
	if n.live > 0 {
		n.lastLive = n.Upper
	}
	for _, below := range [...]*node{n.left, n.right} {
		if below != nil {
			n.last, n.lastLive = later(n.last, below.last), later(n.lastLive, below.lastLive)
		}
	}
}

func later(a, b []byte) []byte {
	if bytes.Compare(a, b) < 0 {
		return b
	}
	return a
}

// end is where the last of a node and those below it ends.
func (s *search) end(n *node) []byte {
	if s.live {
		return n.lastLive
	}
	return n.last
}

// collectBelow collects the watches of a node, and of those below it, that have a key of the commit: from one on, which is that of the
// operation from, because the keys before it are before all of these ranges. The key at to, and those after it, are not before the lower bound
// of any. It reports false when more were found than are wanted.
func (s *search) collectBelow(n *node, from, to int, key []byte) bool {
	for c := s.commit; ; n = n.right {
		s.looked++
		at := c.searchIn(from, to, n.Lower)
		if n.left != nil && bytes.Compare(s.end(n.left), key) > 0 && !s.collectBelow(n.left, from, at, key) {
			return false
		}
		if at == len(c.spans) {
			return true
		}
		if at > from {
			from, key = at, c.key(at)
		}
		if bytes.Compare(n.Upper, key) > 0 && !s.collect(&n.holders) {
			return false
		}
		if n.right == nil || bytes.Compare(s.end(n.right), key) <= 0 {
			return true
		}
	}
}

package btree

import (
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TreeInput is an Input with every version of a tree, in order. Large values keep their references.
type TreeInput struct {
	src  Source
	root Root
	path []treePosition // from the root to the parent of the leaf
	leaf page.LeafLayout
	next int // entry of the leaf
	last int // how many the leaf has
	key  []byte
	err  error
}

type treePosition struct {
	children []page.Child
	next     int // the child after the one that the path follows
}

// NewTreeInput is at the first version. A page of src must not change until the input ends.
func NewTreeInput(src Source, root Root) *TreeInput {
	t := &TreeInput{src: src, root: root}
	t.SeekGE(nil)
	return t
}

// SeekGE implements Input.
func (t *TreeInput) SeekGE(key []byte) {
	t.path, t.next, t.last = t.path[:0], 0, 0
	if t.err != nil || t.root.Empty() {
		return
	}
	t.descend(page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: t.root.ID}, t.root.Level, key)
}

// descend enters the first leaf below c that may have key or a later one.
func (t *TreeInput) descend(c page.Child, level int, key []byte) {
	for ; level > 0; level-- {
		children, err := readChildren(t.src, c, level)
		if err != nil {
			t.err = err
			return
		}
		i := 1
		for i < len(children) && children[i].Compare(key, page.NoTrailer) <= 0 {
			i++
		}
		c = children[i-1]
		t.path = append(t.path, treePosition{children, i})
	}
	p, err := fetch(t.src, c.ID, 0)
	if err != nil {
		t.err = err
		return
	}
	leaf := page.Leaf(p)
	t.leaf = leaf.Layout()
	t.next, t.last = leaf.Search(key), t.leaf.Count()
}

// Next implements Input.
func (t *TreeInput) Next(e *Entry) bool {
	for t.next == t.last {
		if !t.advance() {
			return false
		}
	}
	suffix, trailer, value, large := t.leaf.At(t.next)
	if t.next == 0 || len(suffix) > 0 { // a search never ends between two versions of a key
		t.key = append(append(t.key[:0], t.leaf.Prefix()...), suffix...)
	}
	*e = Entry{Key: t.key, Value: value, Trailer: trailer, Large: large}
	t.next++
	return true
}

// advance enters the next leaf.
func (t *TreeInput) advance() bool {
	for n := len(t.path); n > 0 && t.err == nil; n = len(t.path) {
		at := &t.path[n-1]
		if at.next == len(at.children) {
			t.path = t.path[:n-1]
			continue
		}
		c := at.children[at.next]
		at.next++
		t.descend(c, t.root.Level-n, nil)
		return t.err == nil
	}
	return false
}

// Err implements Input.
func (t *TreeInput) Err() error { return t.err }

package orphans

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

const levelUnknown = -1

// top is an orphan that no readable orphan refers to.
type top struct {
	id       page.ID
	level    int // levelUnknown: it cannot be read
	assigned bool
	node     *lostNode // it is a lost node itself, and its children are known

	// Of a readable page, or of a lost node whose children are known: its first and last version, nil if their leaf cannot
	// be read, and some separator or version inside, by which it can be sorted.
	first, last *version
	inside      *page.Separator

	newest          keys.Epoch
	dead, continued page.DeadRatio // the dead-version ratio, and that of a leaf that begins with an older version of the key before it
}

func (t *top) readable() bool { return t.level != levelUnknown }

// version is the internal key of an entry.
type version struct {
	key     []byte
	trailer keys.Trailer
}

func (v *version) separator() *page.Separator { return &page.Separator{Key: v.key, Trailer: v.trailer} }

// describe reads a readable top, and the first and last leaf below it.
func (f *finder) describe(id page.ID) (*top, error) {
	if err := f.read(id); err != nil {
		return nil, f.changed(id, err)
	}
	h, level := page.ReadHeader(f.buf), page.Inner(f.buf).Level()
	t := &top{id: id, level: level, newest: h.Newest}
	if level == 0 {
		first, last := ends(f.buf)
		t.first, t.last, t.inside = first, last, first.separator()
		t.dead = page.Leaf(f.buf).DeadVersionRatio(false)
		t.continued = page.Leaf(f.buf).DeadVersionRatio(true)
		return t, nil
	}
	node := page.Inner(f.buf)
	n := node.Count()
	t.dead, t.continued = node.DeadVersionRatio(), node.DeadVersionRatio()
	if n > 1 {
		s := node.Separator(nil, 1)
		t.inside = &s
	}
	left, right := node.Child(0), node.Child(n-1)
	var err error
	if t.first, _, err = f.edge(left, level-1, false); err != nil {
		return nil, err
	}
	if _, t.last, err = f.edge(right, level-1, true); err != nil {
		return nil, err
	}
	if t.inside == nil && t.first != nil {
		t.inside = t.first.separator()
	} else if t.inside == nil && t.last != nil {
		t.inside = t.last.separator()
	}
	return t, nil
}

// changed is the error of a page that could be read a moment ago.
func (f *finder) changed(id page.ID, err error) error {
	if pagesource.IsDamage(err) {
		return unproved("page %d can be read at times only: %w", id, err)
	}
	return err
}

// edge is the first and last version of the leftmost or rightmost leaf below a page, nil if it cannot be read.
func (f *finder) edge(id page.ID, level int, right bool) (first, last *version, err error) {
	for ; ; level-- {
		if err := f.read(id); err != nil {
			if pagesource.IsDamage(err) {
				return nil, nil, nil
			}
			return nil, nil, err
		}
		if !page.IsTree(f.buf, level) {
			return nil, nil, unproved("page %d is no tree page of level %d", id, level)
		}
		if level == 0 {
			first, last = ends(f.buf)
			return first, last, nil
		}
		node := page.Inner(f.buf)
		if id = node.Child(0); right {
			id = node.Child(node.Count() - 1)
		}
	}
}

// ends is the first and the last version of a leaf.
func ends(leaf page.Leaf) (first, last *version) {
	v := leaf.Layout()
	at := v.Count() - 1
	last = &version{trailer: v.Trailer(at)}
	for at > 0 && v.Same(at) {
		at--
	}
	last.key = bytes.Join([][]byte{v.Prefix(), v.Suffix(at)}, nil)
	return &version{bytes.Join([][]byte{v.Prefix(), v.Suffix(0)}, nil), v.Trailer(0)}, last
}

// child is what the parent has about t, with the lower bound s. newest bounds what is unknown.
func (t *top) child(s page.Separator, newest keys.Epoch) page.Child {
	c := page.Child{Separator: s, ID: t.id, Newest: newest}
	if t.readable() {
		c.Newest, c.DeadVersions = t.newest, t.dead
		if s.Trailer != page.NoTrailer && t.first != nil && bytes.Equal(s.Key, t.first.key) {
			c.DeadVersions = t.continued
		}
	}
	return c
}

// between is the separator between two neighbours. What a page that cannot be read may have is on its side of the separator:
// before such a page it is directly after the last version that can be read. After it, only the parent knew whether the
// first readable key begins in it: exact is what the parent had, nil if that is not certain.
func between(left, right *top, exact *page.Separator) (page.Separator, error) {
	switch {
	case left.last != nil && right.first != nil:
		if left.last.separator().Compare(right.first.key, right.first.trailer) >= 0 {
			return page.Separator{}, unproved("pages %d and %d overlap", left.id, right.id)
		}
		return btree.Between(left.last.key, left.last.trailer, right.first.key), nil
	case exact != nil:
		if left.last != nil && left.last.separator().Compare(exact.Key, exact.Trailer) >= 0 ||
			right.first != nil && exact.Compare(right.first.key, right.first.trailer) > 0 {
			return page.Separator{}, unproved("the separator of page %d is not before it", right.id)
		}
		return *exact, nil
	case left.last != nil && left.last.trailer > 0:
		return page.Separator{Key: left.last.key, Trailer: left.last.trailer - 1}, nil
	default:
		return page.Separator{}, unproved("nothing says where unreadable page %d ends and page %d begins", left.id, right.id)
	}
}

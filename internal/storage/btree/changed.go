package btree

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Changed collects the keys in [Lower, Upper) whose newest version that is not newer than At is newer than Since; that
// version may be a tombstone. Subtrees in which nothing is newer than Since are not read. An empty bound means none.
type Changed struct {
	Lower, Upper []byte
	Since, At    keys.Epoch

	// PagesMax bounds how many pages one call of Visit reads. It must be more than the levels of a tree and two leaves, so
	// that each call comes further than the one before.
	PagesMax int

	src     Source
	visit   func(key []byte) bool
	pages   int
	key     []byte // of the current entry
	decided []byte // the last key whose newest version at At was seen
	bound   []byte // scratch for separators
	resume  []byte
	paused  bool
}

// Visit calls visit with each key, in order, until it returns false. The key is valid until visit returns. If the walk stops
// before its end, because of PagesMax or of visit, it reports where the next walk has to begin; otherwise resume is nil.
func (c *Changed) Visit(src Source, root Root, visit func(key []byte) bool) (resume []byte, err error) {
	c.src, c.visit, c.pages, c.paused, c.decided = src, visit, 0, false, c.decided[:0]
	if root.Empty() {
		return nil, nil
	}
	err = c.below(root.ID, root.Level)
	c.src, c.visit = nil, nil
	if err != nil || !c.paused {
		return nil, err
	}
	return c.resume, nil
}

// below walks the subtree at page id. Its parent has shown that something in it may be newer than Since.
func (c *Changed) below(id page.ID, level int) error {
	c.pages++
	p, err := fetch(c.src, id, level)
	if err != nil {
		return err
	}
	if level == 0 {
		c.leaf(p)
		return nil
	}
	node, first := page.Inner(p), 0
	if len(c.Lower) != 0 {
		first = node.Search(c.Lower, newestBefore(c.At))
	}
	for i := first; i < node.Count() && !c.paused; i++ {
		if i > first && c.ends(node, i) {
			return nil
		}
		if node.Newest(i) <= c.Since || c.paused {
			continue
		}
		if err := c.below(node.Child(i), level-1); err != nil {
			return err
		}
	}
	return nil
}

// ends reports whether the keys of child i are after Upper. It pauses the walk before the child if no more pages may be read.
func (c *Changed) ends(node page.Inner, i int) bool {
	if len(c.Upper) == 0 && c.pages < c.PagesMax {
		return false
	}
	sep := node.Separator(c.bound[:0], i)
	c.bound = sep.Key
	if len(c.Upper) != 0 && sep.Compare(c.Upper, page.NoTrailer) >= 0 {
		return true
	}
	if c.pages >= c.PagesMax {
		c.pauseAt(sep.Key)
	}
	return false
}

// pauseAt stops before key, or after it if it is decided: the versions that follow in the next leaf are older ones.
func (c *Changed) pauseAt(key []byte) {
	c.paused = true
	c.resume = append(c.resume[:0], key...)
	if bytes.Equal(key, c.decided) {
		c.resume = append(c.resume, 0)
	}
}

// leaf visits the changed keys of a leaf.
func (c *Changed) leaf(p page.Leaf) {
	v := p.Layout()
	i, end := 0, v.Count()
	if len(c.Lower) != 0 {
		i = p.Search(c.Lower)
	}
	if len(c.Upper) != 0 {
		end = p.Search(c.Upper)
	}
	for ; i < end; i++ {
		suffix, t, _, _ := v.At(i)
		if !v.Same(i) {
			c.key = append(append(c.key[:0], v.Prefix()...), suffix...)
		}
		if t.Epoch() > c.At || bytes.Equal(c.key, c.decided) {
			continue
		}
		c.decided = append(c.decided[:0], c.key...)
		if t.Epoch() > c.Since && !c.visit(c.key) {
			c.pauseAt(c.key)
			return
		}
	}
}

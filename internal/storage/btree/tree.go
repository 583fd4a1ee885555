package btree

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// ErrStructure is wrapped by errors about pages that are sound by themselves and do not form a tree.
var ErrStructure = errors.New("btree: broken structure")

// Source gives the tree its pages. There are two: the page cache, and a merge's own buffers.
type Source interface {
	// Page returns verified page id, which the tree expects at this level (0 for leaves: a hint for the cache).
	// The bytes must stay as they are while the caller's pin lasts.
	Page(id page.ID, level int) ([]byte, error)
}

// Foreseer is a Source that wants to know which leaves a merge will ask it for next, so that it can read them in one submission: one by
// one, a merge of random keys into a tree that is larger than memory spends its time waiting for the device.
type Prefetcher interface {
	Source
	Prefetch(leaves []page.ID)
}

// Root names a tree: one immutable state of it. The zero Root is the empty tree.
type Root struct {
	ID    page.ID
	Level int // of the root page: 0 if it is a leaf
}

// Empty reports whether the tree holds nothing.
func (r Root) Empty() bool { return r.ID == 0 }

// Version is what a tree knows of a key at an epoch. Value aliases the page; if Large, it is a page.Ref.
type Version struct {
	Epoch keys.Epoch
	Kind  keys.Kind
	Large bool
	Value []byte
}

// newestBefore is the trailer to search for so that the newest version not newer than e is found.
func newestBefore(e keys.Epoch) keys.Trailer { return keys.MakeTrailer(e, 0xff) }

// fetch reads page id and makes sure that it is what belongs at this level.
func fetch(src Source, id page.ID, level int) ([]byte, error) {
	p, err := src.Page(id, level)
	if err != nil {
		return nil, err
	}
	if !page.IsTree(p, level) {
		return nil, misleveled(p, id, level)
	}
	return p, nil
}

func misleveled(p []byte, id page.ID, level int) error {
	return fmt.Errorf("%w: page %d has type %d and level %d, where level %d belongs",
		ErrStructure, id, page.ReadHeader(p).Type, page.Inner(p).Level(), level)
}

// leafFor descends to the leaf that holds (key, t), or would.
func leafFor(src Source, root Root, key []byte, t keys.Trailer) (page.Leaf, error) {
	id := root.ID
	for level := root.Level; level > 0; level-- {
		p, err := fetch(src, id, level)
		if err != nil {
			return nil, err
		}
		id = page.Inner(p).Child(page.Inner(p).Search(key, t))
	}
	p, err := src.Page(id, 0)
	if err != nil {
		return nil, err
	}
	page.Prefetch(p)
	if !page.IsTree(p, 0) {
		return nil, misleveled(p, id, 0)
	}
	return p, nil
}

// Get returns the newest version of key that is not newer than at. A tombstone is a version: ok says that there is one.
func Get(src Source, root Root, key []byte, at keys.Epoch) (v Version, ok bool, err error) {
	if root.ID == 0 {
		return v, false, nil
	}
	leaf, err := leafFor(src, root, key, newestBefore(at))
	if err != nil {
		return v, false, err
	}
	t, value, large, ok := leaf.Find(key, page.Fingerprint(key), at)
	if !ok {
		return v, false, nil
	}
	return Version{Epoch: t.Epoch(), Kind: t.Kind(), Large: large, Value: value}, true, nil
}

// NewestEpoch returns the epoch of key's newest version if it is newer than since, and else zero. Subtrees without
// anything newer than since are not read.
func NewestEpoch(src Source, root Root, key []byte, since keys.Epoch) (keys.Epoch, error) {
	if root.ID == 0 {
		return 0, nil
	}
	id := root.ID
	for level := root.Level; level > 0; level-- {
		p, err := fetch(src, id, level)
		if err != nil {
			return 0, err
		}
		node := page.Inner(p)
		i := node.Search(key, page.NoTrailer)
		// The key's versions may begin in a leaf and go on in the next ones; its newest stands in the first.
		if node.Newest(i) <= since {
			return 0, nil
		}
		id = node.Child(i)
	}
	leaf, err := fetch(src, id, 0)
	if err != nil {
		return 0, err
	}
	t, _, _, ok := page.Leaf(leaf).Find(key, page.Fingerprint(key), keys.MaxEpoch)
	if !ok || t.Epoch() <= since {
		return 0, nil
	}
	return t.Epoch(), nil
}

// ChangedSince reports whether any key in [lo, hi) has a version newer than since. An empty hi means no upper bound. Subtrees
// without anything newer are not read.
func ChangedSince(src Source, root Root, lo, hi []byte, since keys.Epoch) (bool, error) {
	if root.ID == 0 {
		return false, nil
	}
	return changedBelow(src, root.ID, root.Level, lo, hi, since)
}

func changedBelow(src Source, id page.ID, level int, lo, hi []byte, since keys.Epoch) (bool, error) {
	p, err := fetch(src, id, level)
	if err != nil || page.ReadHeader(p).Newest <= since {
		return false, err
	}
	if level == 0 {
		return changedInLeaf(p, lo, hi, since), nil
	}
	node := page.Inner(p)
	last := node.Count() - 1
	if len(hi) != 0 {
		last = node.Search(hi, page.NoTrailer)
	}
	for i := node.Search(lo, page.NoTrailer); i <= last; i++ {
		if node.Newest(i) <= since {
			continue
		}
		if changed, err := changedBelow(src, node.Child(i), level-1, lo, hi, since); changed || err != nil {
			return changed, err
		}
	}
	return false, nil
}

func changedInLeaf(leaf page.Leaf, lo, hi []byte, since keys.Epoch) bool {
	v := leaf.Layout()
	end := v.Count()
	if len(hi) != 0 {
		end = leaf.Search(hi)
	}
	for i := leaf.Search(lo); i < end; i++ {
		if v.Trailer(i).Epoch() > since {
			return true
		}
	}
	return false
}

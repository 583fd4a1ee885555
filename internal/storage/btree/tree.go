package btree

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// ErrStructure is wrapped by errors about pages that are intact by themselves but do not form a
// tree.
var ErrStructure = errors.New("btree: broken structure")

// Source gives the tree its pages. There are two: the page cache, and the buffers of a merge.
type Source interface {
	// Page returns the verified page id. The tree expects it at this level (0 for leaves), which is
	// a hint for the cache. The bytes must not change while the caller's pin lasts.
	Page(id page.ID, level int) ([]byte, error)
}

// Prefetcher is a Source that can use the list of the leaves that a merge will ask for next: it
// reads them in one submission. One by one, a merge of random keys into a tree that is larger than
// memory would spend its time waiting for the device.
type Prefetcher interface {
	Source
	Prefetch(leaves []page.ID)
}

// Root names one immutable state of a tree. The zero Root is the empty tree.
type Root struct {
	ID    page.ID
	Level int // of the root page: 0 if it is a leaf
}

// Empty reports whether the tree has no page.
func (r Root) Empty() bool { return r.ID == 0 }

// Version is what the tree has of a key at an epoch. Value aliases the page; if Large is set, it is
// a page.Ref.
type Version struct {
	Epoch keys.Epoch
	Kind  keys.Kind
	Large bool
	Value []byte
}

// newestBefore is the trailer with which a search finds the newest version that is not newer than
// e.
func newestBefore(e keys.Epoch) keys.Trailer { return keys.MakeTrailer(e, 0xff) }

// fetch reads page id and checks that it is a tree page of this level.
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
	return fmt.Errorf("%w: page %d has type %d and level %d; expected a tree page of level %d",
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

// Get returns the newest version of key that is not newer than at. A tombstone is a version: ok
// says that there is one.
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

// NewestEpoch returns the epoch of key's newest version if it is newer than since, and else zero.
// Subtrees without anything newer than since are not read.
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
		// The key's versions may begin in one leaf and continue in the next ones; the first leaf
		// has the newest.
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

// ChangedSince reports whether any key in [lo, hi) has a version newer than since. An empty hi
// means no upper bound. Subtrees without anything newer are not read.
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

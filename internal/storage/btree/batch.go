package btree

import (
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// BatchSource fetches many pages in one submission.
type BatchSource interface {
	// Pages puts page ids[i] into pages[i], for all i. The ids differ. The pages must not change
	// until the next call. A source may release its pins at the next call, so that a batch needs no
	// more frames than FindWindow.
	Pages(ids []page.ID, level int, pages [][]byte) error
}

// FindWindow is how many keys FindAll looks up at a time, and the most pages that it needs at once.
// Rings of 64 reads kept the device busier than 32, and more gained nothing.
const FindWindow = 64

// Finder looks up many keys at once. It keeps its buffers: a Finder that is used again allocates
// nothing. The zero Finder is ready.
type Finder struct {
	ids   [FindWindow]page.ID
	pages [FindWindow][]byte
	slot  [FindWindow]int // by key: index of its page in pages

	loaded byte // what prefetchLeaves loads, so that no compiler finds it unused
}

// FindAll calls visit for each of the sorted keys, in order, with its newest version that is not
// newer than at. Each page is fetched once per window of keys, all pages of a level together. The
// version is valid until visit returns.
func (f *Finder) FindAll(src BatchSource, root Root, sorted [][]byte, at keys.Epoch, visit func(i int, v Version, ok bool) error) error {
	for from := 0; from < len(sorted); from += FindWindow {
		window := sorted[from:min(from+FindWindow, len(sorted))]
		if err := f.descend(src, root, window, at); err != nil {
			return err
		}
		if !root.Empty() {
			f.prefetchLeaves(len(window))
		}
		for i, key := range window {
			var v Version
			ok := false
			if !root.Empty() {
				var t keys.Trailer
				t, v.Value, v.Large, ok = page.Leaf(f.pages[f.slot[i]]).Find(key, page.Fingerprint(key), at)
				v.Epoch, v.Kind = t.Epoch(), t.Kind()
			}
			if err := visit(from+i, v, ok); err != nil {
				return err
			}
		}
	}
	return nil
}

// prefetchLeaves loads the cache lines with which a search of a leaf begins, for all keys of the
// window, before the first of them is waited for.
func (f *Finder) prefetchLeaves(keys int) {
	for _, p := range f.pages[:f.slot[keys-1]+1] {
		f.loaded += page.Leaf(p).Prefetch()
	}
}

// descend fetches the leaves of the window's keys, level by level.
func (f *Finder) descend(src BatchSource, root Root, window [][]byte, at keys.Epoch) error {
	if root.Empty() {
		return nil
	}
	count := 1
	f.ids[0] = root.ID
	clear(f.slot[:len(window)])
	for level := root.Level; ; level-- {
		if err := src.Pages(f.ids[:count], level, f.pages[:count]); err != nil {
			return err
		}
		for i, p := range f.pages[:count] {
			if !page.IsTree(p, level) {
				return misleveled(p, f.ids[i], level)
			}
		}
		if level == 0 {
			return nil
		}
		count = f.fanOut(window, at)
	}
}

// fanOut replaces each key's page by the child that it belongs to, and returns how many children
// there are.
func (f *Finder) fanOut(window [][]byte, at keys.Epoch) int {
	count := 0
	for i, key := range window {
		node := page.Inner(f.pages[f.slot[i]])
		id := node.Child(node.Search(key, newestBefore(at)))
		if count == 0 || f.ids[count-1] != id {
			f.ids[count] = id
			count++
		}
		f.slot[i] = count - 1
	}
	return count
}

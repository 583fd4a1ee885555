package pagesource

import (
	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// AdmitWritten puts a copy of a page that a merge has written into the cache: an inner node, and a leaf in whose place the
// base has a cached one. Other leaves get a frame only if that costs nothing: most pages that a merge writes into a large
// tree are never read before they are written again. No reader can ask for these pages before the new root is published.
// If the checkpoint is aborted, the pager invalidates them.
func (c *Cached) AdmitWritten(id, old page.ID, p []byte) {
	if page.IsTree(p, 0) {
		c.cache.Replace(cache.ID(old), cache.ID(id), p, cache.Default)
	} else {
		c.cache.Admit(cache.ID(id), p, cache.VeryHigh)
	}
}

// admitWindow is how many pages AdmitReplacements handles under one guard of the slot.
const admitWindow = 64

// AdmitReplacements reads, for each freed leaf that is in the cache, the leaf that replaces it, and removes the freed one.
// It runs before readers see the new root. Without it, every checkpoint would empty the cache of what it rewrote. The
// slot is that of the caller's goroutine.
func (c *Cached) AdmitReplacements(slot *pin.Slot, freed []page.ID, root btree.Root) {
	var key []byte
	for len(freed) > 0 && !root.Empty() {
		n := min(len(freed), admitWindow)
		slot.Enter()
		for _, id := range freed[:n] {
			key = c.replace(id, root, key)
		}
		slot.Leave()
		freed = freed[n:]
	}
}

// replace handles one freed page. It returns the buffer for the next key.
func (c *Cached) replace(id page.ID, root btree.Root, key []byte) []byte {
	if !c.cache.Contains(cache.ID(id)) {
		return key
	}
	old, err := c.cache.Page(cache.ID(id), cache.VeryLow)
	if err != nil || !page.IsTree(old, 0) {
		return key
	}
	leaf := page.Leaf(old).Layout()
	key = append(append(key[:0], leaf.Prefix()...), leaf.Suffix(0)...)
	// An error is ignored: the next reader of the page gets it.
	_, _, _ = btree.Get(c, root, key, keys.MaxEpoch)
	c.cache.Invalidate(cache.ID(id))
	return key
}

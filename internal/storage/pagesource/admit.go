package pagesource

import (
	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// AdmittingSink writes the pages of a merge, and puts a copy of each into the cache as long as that has unused frames. No
// reader can ask for these pages before the new root is published. If the checkpoint is aborted, the pager invalidates
// them.
type AdmittingSink struct {
	*pager.Sink
	Cached *Cached
}

// WritePage implements btree.Sink.
func (a AdmittingSink) WritePage(id page.ID, p []byte) error {
	if err := a.Sink.WritePage(id, p); err != nil {
		return err
	}
	a.Cached.cache.Admit(cache.ID(id), p, cache.Default)
	return nil
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

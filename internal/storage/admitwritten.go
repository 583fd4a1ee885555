package storage

import (
	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// warmWindow is how many pages warm handles under one slot protection.
const admitWindow = 64

// warm brings what replaces cached leaves into the cache before readers are sent there, and drops the old ones: otherwise every
// checkpoint would empty the cache of what it rewrote. The checkpointing mutex is held.
func (e *Engine) admitWritten(freed []page.ID, root btree.Root) {
	var key []byte
	for len(freed) > 0 && !root.Empty() {
		n := min(len(freed), admitWindow)
		e.slot.Enter()
		for _, id := range freed[:n] {
			if !e.pages.cache.Contains(cache.ID(id)) {
				continue
			}
			old, err := e.pages.cache.Page(cache.ID(id), cache.VeryLow)
			if err != nil || !page.IsTree(old, 0) {
				continue
			}
			leaf := page.Leaf(old).Layout()
			key = append(append(key[:0], leaf.Prefix()...), leaf.Suffix(0)...)
			// An error is the next reader's to find; this is advice.
			_, _, _ = btree.Get(e.pages, root, key, keys.MaxEpoch)
			e.pages.cache.Forget(cache.ID(id))
		}
		e.slot.Leave()
		freed = freed[n:]
	}
}

// admitting hands the pages of a merge to the cache, too, as far as it has frames that nobody uses. Nobody can ask for them before
// the new root is published; should the checkpoint be given up, the pager has them forgotten.
type admittingSink struct {
	*pager.Sink
	cache *cache.Cache
}

// WritePage implements btree.Sink.
func (a admittingSink) WritePage(id page.ID, p []byte) error {
	if err := a.Sink.WritePage(id, p); err != nil {
		return err
	}
	a.cache.Admit(cache.ID(id), p, cache.Default)
	return nil
}

package storage

import (
	"testing"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/keys"
)

// TestReadAheadKnowsNoParentOfAnEarlierRead: a look at an inner node that goes no further, and then a read in a tree that is a single leaf by
// now. What the node's page has become nobody knows: its children may be free pages, which no reader may bring into the cache.
func TestReadAheadKnowsNoParentOfAnEarlierRead(t *testing.T) {
	b := newBench(t)
	defer func() {
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	b.engine.pages.extents = new(extents)
	b.put(0, 100, 8)
	b.checkpoint()
	if level := b.engine.view.Load().root.Level; level != 1 {
		t.Fatalf("the tree's root is at level %d", level)
	}
	r := b.engine.NewReader()
	b.slot.Enter()
	now := keys.Epoch(b.visible.Load())
	if _, changed, err := r.ChangedSince(b.engine.Pin(), []byte{byte(keys.SpaceUser)}, nil, now, keys.MaxEpoch); changed || err != nil {
		t.Fatalf("changed %v, %v", changed, err)
	}
	b.slot.Leave()

	b.delete(1, 100)
	b.checkpoint()
	root := b.engine.view.Load().root
	if root.Level != 0 {
		t.Fatalf("the tree's root is at level %d", root.Level)
	}
	for range 2 { // misses in one extent
		b.engine.pages.cache.Forget(cache.ID(root.ID))
		b.slot.Enter()
		_, found, err := r.Get(keys.Append(nil, keys.SpaceUser, []byte("key-00000")), keys.MaxEpoch)
		b.slot.Leave()
		if !found || err != nil {
			t.Fatalf("found %v, %v", found, err)
		}
	}
	if n := b.engine.pages.cache.Stats().Prefetched; n != 0 {
		t.Errorf("%d pages were read ahead below a node of an older tree", n)
	}
}

package storage

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
)

// TestARepairTreeGetsANewMirror after the old one, or itself, was abandoned. So the next damaged page of it costs nothing either.
func TestARepairTreeGetsANewMirror(t *testing.T) {
	for _, damaged := range []bool{false, true} {
		t.Run(fmt.Sprintf("damaged=%v", damaged), func(t *testing.T) {
			b, _ := abandonRepairTree(t, damaged)
			for range 2 {
				b.put(0, 1, 60)
				b.checkpoint()
				root, mirror := b.engine.checkpoints.skippedPages.Roots()
				if root.Empty() || mirror.Empty() || root.ID == mirror.ID {
					t.Fatalf("after a checkpoint the repair tree is %+v, its mirror %+v", root, mirror)
				}
				b.clearPage(root.ID)
				b.reopen()
				b.readAbandoned()
			}
			if err := b.engine.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestARepairTreeWithoutAMirrorGoesOn if a page of it is damaged, so that no mirror can be built: checkpoints that do not need the page succeed.
func TestARepairTreeWithoutAMirrorGoesOn(t *testing.T) {
	b := openSkipping(t)
	b.put(1000, 3000, 60) // the file does not end with the repair tree, whose pages would be moved
	b.checkpoint()
	e := b.engine
	root, mirror := e.checkpoints.skippedPages.Roots()
	if !e.skipInRepairTree(&repairtree.DamageError{Tree: mirror}) {
		t.Fatal("the mirror was not abandoned")
	}
	var leaves []page.ID
	if err := btree.Walk(pagesource.NewDirect(&e.pager.Reader), root, &btree.Visitor{Page: func(id page.ID, level int, _ []byte) error {
		if level == 0 {
			leaves = append(leaves, id)
		}
		return nil
	}}); err != nil {
		t.Fatal(err)
	}
	b.clearPage(leaves[len(leaves)/2])
	for range 2 {
		b.put(0, 1, 60)
		b.checkpoint()
	}
	if root, mirror := e.checkpoints.skippedPages.Roots(); root.Empty() || !mirror.Empty() || !e.rebuilds.mirrorFailed {
		t.Errorf("the repair tree is %+v, its mirror %+v", root, mirror)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// reopen closes the store and opens it again.
func (b *bench) reopen() {
	b.t.Helper()
	o := b.engine.options
	if err := b.engine.Close(); err != nil {
		b.t.Fatal(err)
	}
	b.visible = new(atomic.Uint64)
	registry := pin.NewRegistry(b.visible)
	b.slot = registry.Slot()
	engine, found, err := Open(b.t.Context(), o, registry)
	if err != nil {
		b.t.Fatal(err)
	}
	b.engine = engine
	b.visible.Store(uint64(found.Epoch))
}

// readAbandoned reads the keys of abandonRepairTree.
func (b *bench) readAbandoned() {
	b.t.Helper()
	r := b.engine.NewReader()
	for i := range 300 {
		for j := range 8 {
			name := fmt.Appendf(nil, "key-%05d-%d", i, j)
			b.slot.Enter()
			_, found, err := r.Newest(keys.Append(nil, keys.SpaceUser, name))
			b.slot.Leave()
			if err != nil || !found {
				b.t.Fatalf("%s: found %v, %v", name, found, err)
			}
		}
	}
}

package storage

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
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

// TestLargeValuesInARepairTreeAreReadFromItsMirror, where a page of the first blob is damaged: of each value one copy can be read.
func TestLargeValuesInARepairTreeAreReadFromItsMirror(t *testing.T) {
	b := newBench(t)
	b.put(0, 300, 60)
	b.checkpoint()
	b.damageLastLeaf()
	value := func(i int) string { return strings.Repeat(string(rune('a'+i)), 5000) }
	const values = 8
	for i := range values {
		var w batch.Builder
		w.Set(keys.SpaceUser, fmt.Appendf(nil, "key-00299-%d", i), []byte(value(i)))
		b.commit(&w)
	}
	b.checkpoint()
	e := b.engine
	buf, overflow := make([]byte, e.pager.PageSize()), 0
	for id := range e.pager.PageCount() {
		if !e.pager.IsLive(id) || e.pager.ReadPage(id, buf) != nil || page.ReadHeader(buf).Type != page.TypeOverflow {
			continue
		}
		overflow++
		b.clearPage(id)
		r := e.NewReader()
		for i := range values {
			b.slot.Enter()
			v, found, err := r.Newest(keys.Append(nil, keys.SpaceUser, fmt.Appendf(nil, "key-00299-%d", i)))
			var got []byte
			if err == nil {
				got, err = r.AppendValue(nil, v)
			}
			b.slot.Leave()
			if err != nil || !found || string(got) != value(i) {
				t.Errorf("value %d beside damaged page %d: found %v, %d bytes, %v", i, id, found, len(got), err)
			}
		}
		b.writePage(id, buf)
	}
	if overflow < 2*values {
		t.Errorf("there are %d overflow pages, the test tests too little", overflow)
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
	b.visible.Store(uint64(b.open(o).Epoch))
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

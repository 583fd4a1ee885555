package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
	"github.com/epochkv/epochkv/internal/vfs"
)

// openSkipping makes a store that skips a leaf, with a repair tree of several pages.
func openSkipping(t *testing.T) *bench {
	t.Helper()
	b := newBench(t)
	b.put(0, 300, 60)
	b.checkpoint()
	b.damageLastLeaf()
	for i := range 300 {
		var w batch.Builder
		for j := range 8 {
			w.Set(keys.SpaceUser, fmt.Appendf(nil, "key-%05d-%d", i, j), []byte(strings.Repeat("n", 60)))
		}
		b.commit(&w)
	}
	b.checkpoint()
	return b
}

// abandonRepairTree abandons the repair tree of openSkipping for its mirror as a merge does that fails afterwards. It
// returns the pages of the abandoned tree, whose root can be damaged so that the pages below it are not known.
func abandonRepairTree(t *testing.T, damaged bool) (b *bench, abandoned []page.ID) {
	t.Helper()
	b = openSkipping(t)
	e := b.engine
	root, mirror := e.checkpoints.skippedPages.Roots()
	if root.Level == 0 || mirror.Empty() {
		t.Fatalf("the repair tree is too small: %+v, %+v", root, mirror)
	}
	if err := btree.Walk(pagesource.NewDirect(&e.pager.Reader), root, &btree.Visitor{Page: func(id page.ID, _ int, _ []byte) error {
		abandoned = append(abandoned, id)
		return nil
	}}); err != nil {
		t.Fatal(err)
	}
	if damaged {
		b.clearPage(root.ID)
	}
	if !e.skipInRepairTree(&repairtree.DamageError{Tree: root}) {
		t.Fatal("the repair tree was not abandoned")
	}
	return b, abandoned
}

// live counts pages that are allocated.
func (b *bench) live(pages []page.ID) (n int) {
	for _, id := range pages {
		if b.engine.pager.IsLive(id) {
			n++
		}
	}
	return n
}

// TestBulkLoadFreesAnAbandonedRepairTree that a merge before it has left: all of its pages, or, if a damaged inner node hides some of them,
// those that are known, and the allocation map of the new state is not exact.
func TestBulkLoadFreesAnAbandonedRepairTree(t *testing.T) {
	for _, damaged := range []bool{false, true} {
		t.Run(fmt.Sprintf("damaged=%v", damaged), func(t *testing.T) {
			b, abandoned := abandonRepairTree(t, damaged)
			e, ctx := b.engine, t.Context()
			load, watermarks := b.buildBulkLoad()
			e.BeginBulkLoadSwitch()
			e.SealBulkLoad()
			if err := e.FinishBulkLoad(ctx, load, watermarks, uint64(time.Now().UnixMicro())); err != nil || !load.Published() {
				t.Fatal(err)
			}
			b.visible.Store(uint64(load.Epoch()))
			if err := errors.Join(e.CompleteBulkLoad(ctx, load), load.Close()); err != nil {
				t.Fatal(err)
			}
			left := 0
			if damaged {
				left = len(abandoned) - 1
			}
			if n := b.live(abandoned); n != left || e.checkpoints.skippedPages.Abandoned() || e.checkpoints.mapExact == damaged {
				t.Errorf("%d of %d pages are live, want %d; exact: %v", n, len(abandoned), left, e.checkpoints.mapExact)
			}
			want := []string{"page"}
			if kinds := b.found(); !slices.Equal(kinds, want) {
				t.Errorf("found %v, want %v", kinds, want)
			}
		})
	}
}

// TestACancelledBulkLoadLeavesTheMapExact: what it would have freed is live as before, whether or not it met a damaged page that hides
// others.
func TestACancelledBulkLoadLeavesTheMapExact(t *testing.T) {
	for _, damaged := range []bool{false, true} {
		t.Run(fmt.Sprintf("damaged=%v", damaged), func(t *testing.T) {
			b, abandoned := abandonRepairTree(t, damaged)
			e := b.engine
			load, _ := b.buildBulkLoad()
			if load.build.mapExact == damaged {
				t.Errorf("the state of the bulk load is exact: %v", load.build.mapExact)
			}
			e.CancelBulkLoad(load)
			if n := b.live(abandoned); n != len(abandoned) || !e.checkpoints.skippedPages.Abandoned() || !e.checkpoints.mapExact {
				t.Errorf("%d of %d pages are live; exact: %v", n, len(abandoned), e.checkpoints.mapExact)
			}
			if err := load.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// endingContext ends when the data file was read so often.
type endingContext struct {
	context.Context
	reads *vfs.Injected
	after int
}

// Err implements context.Context.
func (c endingContext) Err() error {
	if c.reads.Fired() >= c.after {
		return context.Canceled
	}
	return nil
}

// TestABulkLoadEndsWhileItEmptiesSparsePages of large values: their number is half of those that it writes. Writers may be waiting for the
// memory that becomes free with its end.
func TestABulkLoadEndsWhileItEmptiesSparsePages(t *testing.T) {
	b := newBench(t)
	b.put(0, 1200, 130)
	b.checkpoint()
	for i := range 1200 {
		if i%3 > 0 { // each page keeps a part of its values
			b.put(i, i+1, 1)
		}
	}
	b.checkpoint()
	reads := b.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: dataName, Fault: vfs.Slow})
	after := 1 << 30
	for range 2 {
		before := reads.Fired()
		load, watermarks := b.preparedBulkLoad(240, 130)
		err := b.engine.BuildBulkLoad(endingContext{t.Context(), reads, after}, load, watermarks)
		switch n := reads.Fired() - before; {
		case before == 0 && err == nil && n > 100:
			after = reads.Fired() + n - 40 // of the next one
		case before > 0 && reads.Fired() > after+20, before == 0:
			t.Errorf("%d reads, %d of them after the end of the context: %v", n, reads.Fired()-after, err)
		}
		b.engine.CancelBulkLoad(load)
		if err := load.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// buildBulkLoad builds the state of a bulk load of one key.
func (b *bench) buildBulkLoad() (*BulkLoad, GCWatermarks) {
	b.t.Helper()
	load, watermarks := b.preparedBulkLoad(1, 1)
	if err := b.engine.BuildBulkLoad(b.t.Context(), load, watermarks); err != nil {
		b.t.Fatal(err)
	}
	return load, watermarks
}

// preparedBulkLoad has so many new keys with values of a size.
func (b *bench) preparedBulkLoad(count, size int) (*BulkLoad, GCWatermarks) {
	b.t.Helper()
	load, err := b.engine.NewBulkLoad()
	if err != nil {
		b.t.Fatal(err)
	}
	for i := range count {
		if err := load.Add(keys.Append(nil, keys.SpaceUser, fmt.Appendf(nil, "loaded-%05d", i)), make([]byte, size)); err != nil {
			b.t.Fatal(err)
		}
	}
	if _, err := load.Prepare(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
	at := keys.Epoch(b.visible.Load())
	return load, GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}
}

package blob

import (
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestFragmentsMoveUntilEnough: a checkpoint for which something waits moves no more of them.
func TestFragmentsMoveUntilEnough(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	all, del := change{}, change{}
	for i := range 2000 {
		all[i] = value(i, 0, 200)
		if i < 1000 {
			del[i] = nil
		}
	}
	must(t, b.checkpoint(all))
	must(t, b.checkpoint(del))
	b.p.ReuseAllFreed(b.p.Checkpoint())
	moved := func(most int) uint64 {
		ck, err := b.p.Begin()
		must(t, err)
		defer ck.Abort()
		batch, pages := b.s.Begin(ck), 0
		batch.KeepSparse()
		batch.MoveUntil(func() bool {
			pages++
			return pages > most
		})
		read := b.p.PagesRead()
		must(t, batch.Finish(t.Context(), ck.RelocateFrom(200)))
		return b.p.PagesRead() - read
	}
	if few, many := moved(5), moved(1000); few > 20 || many < 100 {
		t.Errorf("%d pages were read to move 5, and %d to move all", few, many)
	}
	must(t, b.audit())
}

// TestPagesThatWereFreedNeedNotMove: a merge has freed most of those that are at the end of the file.
func TestPagesThatWereFreedNeedNotMove(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	must(t, b.checkpoint(change{0: value(0, 0, 5000)}))
	ck, err := b.p.Begin()
	must(t, err)
	defer ck.Abort()
	before := ck.LiveFrom(3)
	if len(before) < 5 {
		t.Fatalf("%v", before)
	}
	ck.Free(before[1], before[3])
	if after := ck.LiveFrom(3); !slices.Equal(after, slices.Concat([]page.ID{before[0], before[2]}, before[4:])) {
		t.Errorf("%v are left of %v", after, before)
	}
}

package pager

import (
	"context"
	"encoding/binary"
	"slices"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// fillPages writes n pages and commits; the last of them is the root, the others are only live.
func fillPages(t *testing.T, p *Pager, n int, free ...page.ID) (ids []page.ID) {
	t.Helper()
	ck, err := p.Begin()
	must(t, err)
	ck.Free(free...)
	ck.RelocateFrom(100)
	w := ck.Writer()
	for len(ids) < n {
		id := ck.AllocExtent(1).First
		buf, err := w.Page(id)
		must(t, err)
		page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: id, Checkpoint: ck.Number()})
		page.Seal(buf)
		ids = append(ids, id)
	}
	must(t, w.Flush())
	must(t, ck.Commit(context.Background(), State{Root: ids[n-1]}))
	return ids
}

// TestMapPagesMoveDown: pages of the map that no change touches leave the file end, too.
func TestMapPagesMoveDown(t *testing.T) {
	p, err := Create(vfs.NewMem(), toyFile, Options{PageSize: 512})
	must(t, err)
	ids := fillPages(t, p, 24_000) // seven leaves of the map, which are after them
	root := fillPages(t, p, 1, ids[8000:]...)
	for range 3 {
		p.ReuseAllFreed(p.Checkpoint())
		root = fillPages(t, p, 1, root...)
	}
	if s := p.Stats(); s.PageCount > 8200 {
		t.Fatalf("%+v", s)
	}
	p.ReuseAllFreed(p.Checkpoint())
	must(t, p.Shrink(nothing))
	if s := p.Stats(); s.FileBytes > 12_000*512 {
		t.Fatalf("%+v", s)
	}
}

// TestMapFreesThePagesOfItsRemovedLeaves: the only change is that the last leaf of the map is not needed any
// more. The pages of that leaf and of the node above it are in the range of the leaf that stays.
func TestMapFreesThePagesOfItsRemovedLeaves(t *testing.T) {
	mem := vfs.NewMem()
	p, err := Create(mem, toyFile, Options{PageSize: 512})
	must(t, err)
	const perLeaf = (512 - 40) * 8
	commit := func(root page.ID, free ...page.ID) {
		ck, err := p.Begin()
		must(t, err)
		ck.Free(free...)
		must(t, ck.Commit(context.Background(), State{Root: root}))
		p.ReuseAllFreed(p.Checkpoint())
	}
	ids := fillPages(t, p, perLeaf+100)
	root, low, high := ids[50], ids[:40], ids[perLeaf-2:] // ids begin at page 2
	commit(root, ids[30:33]...)                           // the copies of the superblocks move
	ids = append(ids[:30:30], ids[33:]...)
	for range 4 {
		commit(root)
	}
	commit(root, low[:20]...)
	commit(root, append(low[20:21:21], high[0])...) // both leaves of the map move into the holes
	for _, nodes := range p.allocation.levels {
		for _, id := range nodes {
			if id >= perLeaf {
				t.Fatalf("a page of the map is %d: the test tests nothing", id)
			}
		}
	}
	commit(root, high[1:]...)
	if n := p.allocation.leaves(); n != 1 {
		t.Fatalf("%d leaves", n)
	}
	must(t, p.Close())
	p, err = Open(mem, toyFile, Options{})
	must(t, err)
	must(t, p.Audit(func(each func(page.ID) error) error {
		for _, id := range ids[21 : perLeaf-2-3] {
			if err := each(id); err != nil {
				return err
			}
		}
		return nil
	}))
}

// TestLastBytesOfADiskAreUsed: if a whole step does not fit, the file grows by the bytes needed.
func TestLastBytesOfADiskAreUsed(t *testing.T) {
	mem := vfs.NewMem()
	p, err := Create(mem, toyFile, Options{PageSize: 512})
	must(t, err)
	fillPages(t, p, 30)
	size := p.Stats().FileBytes
	mem.SetCapacity((size+4095)/4096*4096 + 4096)
	fillPages(t, p, int(size)/512-int(p.Stats().PageCount)+2) // with its map page it needs three pages more than there are
	if got := p.Stats().FileBytes; got <= size || got > size+4096+512 {
		t.Fatalf("the file went from %d to %d bytes", size, got)
	}
}

// TestFileSizeDoesNotOscillate: a store whose size varies by less than a step is not truncated.
func TestFileSizeDoesNotOscillate(t *testing.T) {
	p, err := Create(vfs.NewMem(), toyFile, Options{PageSize: 512})
	must(t, err)
	fillPages(t, p, 1000)
	swing := fillPages(t, p, 20)
	size := p.Stats().FileBytes
	for range 10 {
		p.ReuseAllFreed(p.Checkpoint())
		must(t, p.Shrink(nothing))
		root := fillPages(t, p, 1, swing...)
		p.ReuseAllFreed(p.Checkpoint())
		must(t, p.Shrink(nothing))
		swing = fillPages(t, p, 20, root...)
		if got := p.Stats().FileBytes; got != size {
			t.Fatalf("the file went from %d to %d bytes", size, got)
		}
	}
}

// TestEveryPageIsInvalidatedBeforeItIsReused: a cache that drops the pages that OnFree names never serves
// old contents.
func TestEveryPageIsInvalidatedBeforeItIsReused(t *testing.T) {
	mem := vfs.NewMem()
	p, err := Create(mem, toyFile, Options{PageSize: 512})
	must(t, err)
	must(t, p.Close())
	cache := map[page.ID]string{}
	p, err = Open(mem, toyFile, Options{OnFree: func(id page.ID) { delete(cache, id) }})
	must(t, err)
	y := &toy{p: p, r: &p.Reader, leaves: map[int]toyLeaf{}}
	admit := func(ids []page.ID) {
		for _, id := range ids {
			buf := make([]byte, 512)
			must(t, p.ReadPage(id, buf))
			if old, ok := cache[id]; ok && old != string(buf) {
				t.Fatalf("page %d is cached with contents of checkpoint %d, and was written by %d",
					id, binary.LittleEndian.Uint64([]byte(old[16:])), page.ReadHeader(buf).Checkpoint)
			}
			cache[id] = string(buf)
		}
	}
	for round := range 40 {
		ck, err := p.Begin()
		must(t, err)
		_, _, err = y.build(ck, []int{round % 20}, nil, uint64(round*2))
		must(t, err)
		admit(slices.Concat(ck.madeLive, ck.written))
		ck.Abort()
		must(t, y.checkpoint(1, []int{round % 20, round * 7 % 20}, []int{round * 3 % 20}, uint64(round*2+1)))
		admit([]page.ID{y.root})
		for _, l := range y.leaves {
			admit([]page.ID{l.id})
		}
		p.ReuseAllFreed(p.Checkpoint() - uint64(round%2))
		must(t, p.Shrink(nothing))
	}
}

// TestAFullDeviceThatCannotTruncateIsNotFinal: a file system that copies what it changes needs space for a truncation, too.
func TestAFullDeviceThatCannotTruncateIsNotFinal(t *testing.T) {
	for _, errno := range []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT} {
		faulty := vfs.NewFaulty(vfs.NewMem())
		p, err := Create(faulty, toyFile, Options{PageSize: 512})
		must(t, err)
		ids := fillPages(t, p, 4000)
		root := fillPages(t, p, 1, ids...)
		for range 3 {
			p.ReuseAllFreed(p.Checkpoint())
			root = fillPages(t, p, 1, root...)
		}
		p.ReuseAllFreed(p.Checkpoint())
		size := p.Stats().FileBytes
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpTruncate, Err: errno})
		must(t, p.Shrink(nothing))
		if got := p.Stats().FileBytes; rule.Fired() != 1 || got != size || p.Err() != nil {
			t.Fatalf("%d truncations have failed; the file went from %d to %d bytes: %v", rule.Fired(), size, got, p.Err())
		}
		rule.Remove()
		fillPages(t, p, 1, root...)
		p.ReuseAllFreed(p.Checkpoint())
		must(t, p.Shrink(nothing))
		if got := p.Stats().FileBytes; got >= size/2 {
			t.Fatalf("the file has %d bytes after it had %d", got, size)
		}
		must(t, p.Close())
	}
}

func nothing() int64 { return 0 }

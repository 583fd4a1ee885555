package pager

import (
	"context"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// sparseCopy copies the live pages of a file to a disk of its own, as a restoration does, and programs that copy files.
func sparseCopy(t *testing.T, p *Pager) *vfs.Mem {
	t.Helper()
	mem := vfs.NewMem()
	f, err := mem.Open(toyFile, vfs.Create)
	must(t, err)
	buf := make([]byte, p.pageSize)
	for i := p.space.live.Next(0); i < p.space.live.Len(); i = p.space.live.Next(i + 1) {
		if _, err := p.file.ReadAt(buf, p.offset(page.ID(i))); err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(buf, p.offset(page.ID(i))); err != nil {
			t.Fatal(err)
		}
	}
	must(t, f.Truncate(p.fileSize.Load()))
	must(t, errors.Join(f.Sync(), f.Close()))
	return mem
}

// TestFreePagesWithoutBlocksAreNoReserve: on a full disk, pages could not be written there.
func TestFreePagesWithoutBlocksAreNoReserve(t *testing.T) {
	const pages = 100
	p, err := Create(vfs.NewMem(), toyFile, Options{PageSize: 4096})
	must(t, err)
	ids := fillPages(t, p, pages)
	fillPages(t, p, 1, ids[:pages-1]...)
	mem := sparseCopy(t, p)
	must(t, p.Close())

	p, err = Open(mem, toyFile, Options{})
	must(t, err)
	const reserve = pages / 2 * 4096
	p.SetReserve(reserve)
	if free, want := p.FreeBytes(); free < want {
		t.Fatalf("%d bytes are free, the test needs %d", free, want)
	}
	mem.LeaveFree(0)
	if err := p.FillReserve(0); !errors.Is(err, vfs.ErrNoSpace) || !p.Hollow() {
		t.Fatalf("the reserve of a full disk: %v, hollow %v", err, p.Hollow())
	}
	mem.SetCapacity(0)
	if err := p.FillReserve(0); err != nil || p.Hollow() {
		t.Fatalf("the reserve of a disk with space: %v, hollow %v", err, p.Hollow())
	}
	mem.LeaveFree(0)
	must(t, p.FillReserve(0))
	ck, err := p.Begin()
	must(t, err)
	w := ck.Writer()
	var last page.ID
	for range pages / 2 {
		last = ck.AllocExtent(1).First
		buf, err := w.Page(last)
		must(t, err)
		page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: last, Checkpoint: ck.Number()})
		page.Seal(buf)
	}
	must(t, w.Flush())
	must(t, ck.Commit(context.Background(), State{Root: last}))
	must(t, p.Close())
}

package pager

import (
	"context"
	"encoding/binary"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestSinkTakesPagesFromManyWorkers: every page arrives, and ascending pages of one worker are written in few
// pieces.
func TestSinkTakesPagesFromManyWorkers(t *testing.T) {
	const pages, size = 2000, 512
	for _, workers := range []int{1, 4} {
		p, err := Create(vfs.NewMem(), toyFile, Options{PageSize: size})
		must(t, err)
		ck, err := p.Begin()
		must(t, err)
		sink := ck.Sink()
		var ids []page.ID
		for len(ids) < pages {
			first, n, err := sink.AllocExtent(64)
			must(t, err)
			for i := range n {
				ids = append(ids, first+page.ID(i))
			}
		}
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				buf := make([]byte, size)
				for i := w; i < len(ids); i += workers {
					page.PutHeader(buf, page.Header{Type: page.TypeLeaf, ID: ids[i], Checkpoint: ck.Number()})
					binary.LittleEndian.PutUint64(buf[page.HeaderSize:], uint64(ids[i])*3)
					page.Seal(buf)
					if err := sink.WritePage(ids[i], buf); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		must(t, sink.Flush())
		must(t, ck.Commit(context.Background(), State{Root: ids[0]}))
		must(t, p.readEach(ids, func(i int, buf []byte) error {
			if binary.LittleEndian.Uint64(buf[page.HeaderSize:]) != uint64(ids[i])*3 {
				t.Errorf("page %d has wrong contents", ids[i])
			}
			return nil
		}))
		if s := p.Stats(); workers == 1 && s.Submissions > 20 {
			t.Fatalf("%d pages in %d pieces", s.PagesWritten, s.Submissions)
		}
		must(t, p.Close())
	}
}

func TestSinkRefusesForeignPages(t *testing.T) {
	p, err := Create(vfs.NewMem(), toyFile, Options{PageSize: 512})
	must(t, err)
	ck, err := p.Begin()
	must(t, err)
	defer ck.Abort()
	id := ck.AllocExtent(1).First
	buf := make([]byte, 512)
	for _, h := range []page.Header{{ID: id + 1, Checkpoint: ck.Number()}, {ID: id, Checkpoint: ck.Number() - 1}} {
		page.PutHeader(buf, h)
		if err := ck.Sink().WritePage(id, buf); err == nil {
			t.Fatalf("header %+v was written as page %d of checkpoint %d", h, id, ck.Number())
		}
	}
}

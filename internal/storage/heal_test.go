package storage

import (
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestALeafThatCanBeReadAgainIsSkippedNoMore: its keys can be scanned again, with what was written to them meanwhile. If it cannot be read when
// the checkpoint comes, it stays skipped.
func TestALeafThatCanBeReadAgainIsSkippedNoMore(t *testing.T) {
	for _, flaps := range []bool{false, true} {
		t.Run(fmt.Sprintf("flaps=%v", flaps), func(t *testing.T) {
			b := newBench(t)
			e := b.engine
			b.put(0, 300, 60)
			b.checkpoint()
			intact := make([]byte, int64(e.pager.PageCount())*int64(e.pager.PageSize()))
			f, err := b.fs.Open("db/data.ekv", vfs.ReadOnly)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := f.ReadAt(intact, 0); err != nil {
				t.Fatal(err)
			}
			_ = f.Close()
			b.damageLastLeaf()
			var w batch.Builder
			w.Set(keys.SpaceUser, []byte("key-00299"), []byte("new"))
			w.Delete(keys.SpaceUser, []byte("key-00298"))
			w.Set(keys.SpaceUser, []byte("key-00300"), []byte(strings.Repeat("l", 3000)))
			b.commit(&w)
			b.checkpoint()
			skipped := e.checkpoints.skippedPages.Pages()
			if len(skipped) != 1 || skipped[0].Level != 0 {
				t.Fatalf("skipped: %+v", skipped)
			}
			e.healLeaves(t.Context())
			if e.rebuilds.waiting.Load() {
				t.Fatal("a leaf that cannot be read was healed")
			}
			id, size := skipped[0].ID, e.pager.PageSize()
			b.writePage(id, intact[int(id)*size:(int(id)+1)*size])
			e.pages.Invalidate(id)
			e.healLeaves(t.Context())
			if flaps {
				b.clearPage(id)
				e.pages.Invalidate(id)
			}
			b.checkpoint()
			if n := len(e.checkpoints.skippedPages.Pages()); (n == 1) != flaps || e.rebuilds.waiting.Load() {
				t.Fatalf("%d pages are skipped", n)
			}
			want := []string{"page"}
			if !flaps {
				want = nil
				if n := b.scanned(); n != 300 {
					t.Errorf("a scan has %d keys", n)
				}
			}
			if kinds := b.found(); fmt.Sprint(kinds) != fmt.Sprint(want) {
				t.Errorf("found %v, want %v", kinds, want)
			}
		})
	}
}

// scanned counts the keys of a scan.
func (b *bench) scanned() (n int) {
	b.t.Helper()
	b.slot.Enter()
	defer b.slot.Leave()
	r, c := b.engine.NewReader(), &Cursor{}
	from := []byte{byte(keys.SpaceUser)}
	for {
		r.OpenCursor(c, keys.Epoch(b.visible.Load()), from, []byte{byte(keys.SpaceUser) + 1}, 0)
		for c.SeekGE(from); c.Valid(); c.Next() {
			if c.Version().Kind.HasValue() {
				n++
			}
		}
		if c.Err() != nil {
			b.t.Fatal(c.Err())
		}
		if !c.Paused() {
			return n
		}
		from = append([]byte(nil), c.Resume()...)
	}
}

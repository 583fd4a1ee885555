package pager

import (
	"errors"
	"maps"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestValuesThatLookLikeSuperblocksAreNone: the payload of every page holds superblocks of a smaller page size, each in its place and newer
// than all others. With both slots damaged the copies are found all the same, and without these no superblock is.
func TestValuesThatLookLikeSuperblocksAreNone(t *testing.T) {
	const size, leaves = 8192, 16
	for forged := page.SizeMin; forged < size; forged *= 2 {
		mem := vfs.NewMem()
		y := createToy(t, mem, size)
		var all []int
		for i := range leaves {
			all = append(all, i)
		}
		must(t, y.checkpoint(1, all, nil, 1))
		must(t, y.checkpoint(2, all[:1], nil, 2))
		want, sb := y.contents(), *y.p.current()
		edit(t, mem, func(data []byte) {
			for _, l := range y.leaves {
				p := data[int(l.id)*size:][:size]
				for at := forged; at < size; at += forged {
					id := page.ID((int(l.id)*size + at) / forged)
					s := superblock{checkpoint: 1000, pageSize: forged, pageCount: id + 2, copy: id, nextCopy: id + 1, state: State{Format: FormatNewest}}
					s.encode(p[at:][:forged], id)
				}
				page.Seal(p)
			}
		})
		must(t, y.p.Close())

		flipIn(t, mem, size, 800, 0, 1)
		y, err := openToy(mem)
		if err != nil {
			t.Fatalf("pages of %d bytes in values: %v", forged, err)
		}
		if !maps.Equal(y.contents(), want) || y.p.StoreID() != sb.storeID || y.p.SuperblocksRepaired() != superblocks {
			t.Errorf("pages of %d bytes in values: checkpoint %d, %v", forged, y.p.Checkpoint(), y.contents())
		}
		must(t, y.p.Close())

		flipIn(t, mem, size, 800, 0, 1, sb.copy, sb.nextCopy)
		if y, err := openToy(mem); !errors.Is(err, ErrSuperblocks) {
			t.Errorf("pages of %d bytes in values: without superblocks %v, %v", forged, y, err)
		}
		raw, err := OpenRaw(mem, toyFile)
		must(t, err)
		if raw.PageSize() != size {
			t.Errorf("pages of %d bytes in values: pages of %d bytes are read", forged, raw.PageSize())
		}
		must(t, raw.Close())
	}
}

package pager

import (
	"encoding/binary"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// The allocation map is a page array with one bit for each page: whether the page is live. A pager reads
// it once, when the file is opened. A snapshot reads it when a verification asks for it.

// mapLeaves is the number of leaves of an allocation map for this many pages. A file without pages needs
// none.
func (r *Reader) mapLeaves(pages page.ID) int {
	if pages <= superblocks {
		return 0
	}
	perLeaf := ArrayLeafBytes(r.pageSize) * 8
	return (int(pages) + perLeaf - 1) / perLeaf
}

// pageCountFor is the page count of a state with these live pages, whose map has this many leaves. If the
// map's own pages moved down, the last live page may be before the range of the map's last leaf. The count
// then includes that leaf's range, because Open computes the number of leaves from the count.
func (r *Reader) pageCountFor(live *bitset.Set, leaves int) page.ID {
	count := endOf(live)
	if r.mapLeaves(count) < leaves {
		count = page.ID((leaves-1)*ArrayLeafBytes(r.pageSize)*8 + 1)
	}
	return count
}

// endOf is the first page after all pages of a set.
func endOf(pages *bitset.Set) page.ID { return page.ID(pages.Last(pages.Len()) + 1) }

// readMap reads the allocation map of the newest durable state, and the live pages from it. The superblocks
// count as live.
func (r *Reader) readMap() (allocation *PageArray, live *bitset.Set, err error) {
	sb := r.current()
	if sb.pageCount > maxPage {
		return nil, nil, r.corrupt(sb.slot(), fmt.Sprintf("impossible page count %d", sb.pageCount))
	}
	live = newLive()
	allocation, err = r.ReadArray(ArrayAllocationMap, sb.allocation, r.mapLeaves(sb.pageCount), func(i int, payload []byte) error {
		decodeMapLeaf(live, i, payload)
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
	if end := r.pageCountFor(live, allocation.leaves()); end != sb.pageCount {
		return nil, nil, r.corrupt(sb.allocation.Page, fmt.Sprintf("the map ends at page %d, the superblock says %d", end, sb.pageCount))
	}
	newest := max(r.writtenBy(sb.state.Root), r.writtenBy(sb.blobs.Table.Page))
	if wrote := r.writtenBy(sb.allocation.Page); wrote > 0 && wrote < newest { // each checkpoint that writes a page writes the map's root
		return nil, nil, r.corrupt(sb.allocation.Page, fmt.Sprintf("checkpoint %d wrote the map, and checkpoint %d pages of the state", wrote, newest))
	}
	return allocation, live, nil
}

// writtenBy is the checkpoint that wrote page id; zero if there is no such page or if it cannot be read.
func (r *Reader) writtenBy(id page.ID) uint64 {
	buf := vfs.AlignedBuffer(r.pageSize)
	if id == 0 || r.ReadPage(id, buf) != nil {
		return 0
	}
	return page.ReadHeader(buf).Checkpoint
}

// newLive is the live pages of an empty state: the superblocks.
func newLive() *bitset.Set {
	live := &bitset.Set{}
	for id := range superblocks {
		live.Add(id)
	}
	return live
}

// encodeMapLeaf fills leaf i of the allocation map: one bit for each page, in words of 64.
func encodeMapLeaf(live *bitset.Set, i int, payload []byte) {
	words := len(payload) / 8
	for w := range words {
		binary.LittleEndian.PutUint64(payload[w*8:], live.Word(i*words+w))
	}
}

// decodeMapLeaf sets the live pages of leaf i.
func decodeMapLeaf(live *bitset.Set, i int, payload []byte) {
	words := len(payload) / 8
	for w := range words {
		word := binary.LittleEndian.Uint64(payload[w*8:])
		if i*words+w == 0 {
			word |= 1<<superblocks - 1
		}
		live.SetWord(i*words+w, word)
	}
}

// auditLive compares live pages with the pages that are reachable. reachable calls its argument once for
// every page that the tree and the blob store reach. The map's own pages and the superblocks are added.
func (r *Reader) auditLive(live *bitset.Set, allocation *PageArray, reachable func(each func(page.ID) error) error) error {
	reached, err := r.reach(live, allocation, reachable)
	if err != nil {
		return err
	}
	for i := range live.Len() / 64 {
		if lost := live.Word(i) &^ reached.Word(i); lost != 0 {
			return brokenf("pages %d.. are live and not reachable: %#x", i*64, lost)
		}
	}
	return nil
}

// reach returns the pages that are reachable: those that its argument says, the map's own and the
// superblocks. Each must be live, and reachable once.
func (r *Reader) reach(live *bitset.Set, allocation *PageArray, reachable func(each func(page.ID) error) error) (*bitset.Set, error) {
	var reached bitset.Set
	reach := func(id page.ID) error {
		if id > maxPage || !live.Has(int(id)) {
			return brokenf("page %d is reachable and not live", id)
		}
		if !reached.Add(int(id)) {
			return brokenf("page %d is reachable twice", id)
		}
		return nil
	}
	var err error
	allocation.Pages(func(id page.ID) {
		if err == nil {
			err = reach(id)
		}
	})
	for id := range page.ID(superblocks) {
		reached.Add(int(id))
	}
	for _, id := range []page.ID{r.current().copy, r.current().nextCopy} {
		if id != 0 && err == nil {
			err = reach(id)
		}
	}
	if err == nil {
		err = reachable(reach)
	}
	return &reached, err
}

package blob

import (
	"maps"
	"slices"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// pagesRead is the pages that a batch has read.
type pagesRead struct {
	scratch     []byte                  // one page
	ahead       map[page.ID]*pager.Read // of earlier states: no checkpoint changes them
	slab, spare []byte                  // memory of ahead
	unread      bool                    // a page could not be read since this was reset
}

// ReadAhead reads what Drop needs of some references, in three submissions: the first fragments, the second ones, and the first of
// their overflow pages. Drop reads these pages one by one otherwise: a million values took 25 minutes with a device that takes a millisecond. The
// pages stay in memory until the next call.
func (b *Batch) ReadAhead(refs []page.Ref) {
	if n := 3 * len(refs) * b.s.pageSize; len(b.slab) < n {
		b.slab = vfs.AlignedBuffer(n)
	}
	b.ahead, b.spare = map[page.ID]*pager.Read{}, b.slab
	type blob struct {
		id    uint64
		at    location
		pages int
	}
	var blobs []blob
	for _, r := range refs {
		ref, err := decodeRef(r)
		if err != nil {
			continue
		}
		pages, _ := split(int(ref.length), b.s.pageSize)
		if at := b.locationOf(ref.id); at.found() && (pages > 0 || at.continued()) && b.want(at.page()) {
			blobs = append(blobs, blob{ref.id, at, pages})
		}
	}
	b.readWanted()
	found := blobs[:0]
	for _, o := range blobs {
		if _, at, err := b.secondFragment(o.id, o.at); err == nil && o.pages > 0 && (at == 0 || b.want(at.page())) {
			found = append(found, o)
		}
	}
	b.readWanted()
	for _, o := range found {
		if h, err := b.headFragment(o.id); err == nil && len(h.extents) > 0 {
			b.want(h.extents[0].First)
		}
	}
	b.readWanted()
}

// want has a page read by readWanted, and reports false for one that is not of an earlier state.
func (b *Batch) want(id page.ID) bool {
	if !b.ck.IsLive(id) || b.ck.IsTaken(id) {
		return false
	}
	if b.ahead[id] == nil {
		b.ahead[id] = &pager.Read{ID: id}
	}
	return true
}

func (b *Batch) readWanted() {
	var wanted []pager.Read
	for _, id := range slices.Sorted(maps.Keys(b.ahead)) {
		if b.ahead[id].Buf == nil {
			wanted = append(wanted, pager.Read{ID: id, Buf: b.spare[:b.s.pageSize]})
			b.spare = b.spare[b.s.pageSize:]
		}
	}
	for i := range wanted {
		b.ahead[wanted[i].ID] = &wanted[i]
	}
	_ = b.s.pager.ReadPages(wanted) // each has its own error
}

// BlobPage implements PageSource, also for pages of this batch. The page is valid until the next call.
func (b *Batch) BlobPage(id page.ID) ([]byte, error) {
	if _, ok := b.fresh[id]; ok {
		if err := b.w.Flush(); err != nil {
			return nil, err
		}
	} else if r := b.ahead[id]; r != nil {
		copy(b.scratch, r.Buf)
		b.unread = b.unread || r.Err != nil
		return b.scratch, r.Err
	}
	err := b.s.pager.ReadPage(id, b.scratch)
	b.unread = b.unread || err != nil
	return b.scratch, err
}

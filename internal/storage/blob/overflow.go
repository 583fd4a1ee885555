package blob

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// overflow is the overflow pages of a blob as a head names them, and the checkpoint that wrote the page with the head.
//
// After a write that the device has lost, the head may be an older one, of a blob that had the id and the length before. All pages that it
// names were freed after the checkpoint that wrote it: they are not live, or a later checkpoint has written them, for a blob or for the tree. So
// the first of them tells whether they may be freed. Such a head may name a second fragment of another blob, too.
type overflow struct {
	id, wrote uint64
	extents   []pager.Extent
}

func (b *Batch) freeAll(o *overflow) {
	b.free(o.extents)
	for _, e := range o.extents {
		b.state.OverflowPages -= uint64(e.Count)
	}
}

// checkOwner reports as damage if the first page is not an overflow page of the blob from before its head was written. A page that
// cannot be read tells nothing.
func (b *Batch) checkOwner(o *overflow) error {
	id := o.extents[0].First
	if o.wrote == b.ck.Number() && b.ck.IsTaken(id) {
		return nil // this batch has stored the blob. Its pages may not be written yet
	}
	_, err := b.BlobPage(id)
	unreadable := errors.Is(err, pager.ErrCorrupt)
	if err != nil && !unreadable {
		return err
	}
	h := page.ReadHeader(b.scratch)
	if !b.ck.IsLive(id) || !unreadable && (h.Type != page.TypeOverflow || h.Checkpoint > o.wrote || overflowOwner(b.scratch) != o.id) {
		return b.s.pager.Corrupt(id, fmt.Sprintf("it is not the first overflow page of blob %d, whose head checkpoint %d wrote", o.id, o.wrote))
	}
	return nil
}

package blob

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// overflow is the overflow pages of a blob as a head names them, and the checkpoint that wrote the page with the head.
//
// After a write that the device has lost, the head may be an older one, of a blob that had the id and the length before. All pages that it
// names were freed after the checkpoint that wrote it: they are not live, or a later checkpoint has written them, for a blob or for the tree. So
// the first of them tells whether they may be freed.
type overflow struct {
	id, wrote uint64
	extents   []pager.Extent
}

// leavingMax is how many blobs wait until the first of their overflow pages are read in one submission.
const leavingMax = 32

// drops is the blobs that a batch drops.
type drops struct {
	ids     []uint64
	leaving []overflow // not yet freed
}

// dropOverflow frees the overflow pages of a dropped blob, now or later.
func (b *Batch) dropOverflow(o overflow) error {
	if b.stored(&o) {
		b.freeAll(&o)
		return nil
	}
	if b.dropped.leaving = append(b.dropped.leaving, o); len(b.dropped.leaving) < leavingMax {
		return nil
	}
	return b.freeOverflow()
}

// freeOverflow frees the overflow pages of dropped blobs. If a head was an older one, the pages of its blob are unknown, and stay.
func (b *Batch) freeOverflow() error {
	if len(b.dropped.leaving) == 0 {
		return nil
	}
	slab, reads := vfs.AlignedBuffer(len(b.dropped.leaving)*b.s.pageSize), make([]pager.Read, len(b.dropped.leaving))
	for i := range b.dropped.leaving {
		reads[i] = pager.Read{ID: b.dropped.leaving[i].extents[0].First, Buf: slab[i*b.s.pageSize : (i+1)*b.s.pageSize]}
	}
	_ = b.s.pager.ReadPages(reads) // each has its own error
	for i := range b.dropped.leaving {
		switch err := b.checkFirst(&b.dropped.leaving[i], reads[i].Buf, reads[i].Err); {
		case err == nil:
			b.freeAll(&b.dropped.leaving[i])
		case !errors.Is(err, pager.ErrCorrupt):
			return err
		}
	}
	b.dropped.leaving = b.dropped.leaving[:0]
	return nil
}

func (b *Batch) freeAll(o *overflow) {
	b.free(o.extents)
	for _, e := range o.extents {
		b.state.OverflowPages -= uint64(e.Count)
	}
}

// stored reports whether this batch has stored the blob. Its pages may not be written yet.
func (b *Batch) stored(o *overflow) bool {
	return o.wrote == b.ck.Number() && b.ck.IsTaken(o.extents[0].First)
}

// checkNow is checkFirst for a blob whose pages are not freed with those of others.
func (b *Batch) checkNow(o *overflow) error {
	if b.stored(o) {
		return nil
	}
	_, err := b.BlobPage(o.extents[0].First)
	return b.checkFirst(o, b.scratch, err)
}

// checkFirst reports as damage if the first page, as read, is not an overflow page of the blob from before its head was written. A page that
// cannot be read tells nothing, and is freed.
func (b *Batch) checkFirst(o *overflow, first []byte, err error) error {
	unreadable := errors.Is(err, pager.ErrCorrupt)
	if err != nil && !unreadable {
		return err
	}
	id, h := o.extents[0].First, page.ReadHeader(first)
	if !b.ck.IsLive(id) || !unreadable && (h.Type != page.TypeOverflow || h.Checkpoint > o.wrote || overflowOwner(first) != o.id) {
		return b.s.pager.Corrupt(id, fmt.Sprintf("it is not the first overflow page of blob %d, whose head checkpoint %d wrote", o.id, o.wrote))
	}
	return nil
}

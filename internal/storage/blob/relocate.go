package blob

import (
	"context"
	"encoding/binary"
	"errors"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// relocateOverflowMax bounds the overflow pages that one checkpoint moves down, beyond the first value.
const relocateOverflowMax = 2048

// relocate moves fragments away from the pages at and past limit: it evacuates blob pages there, and
// copies blobs that have overflow pages there. Pages that cannot be read stay. A large file may have many
// pages there, so it ends with ctx, and when enough is moved (see MoveUntil).
func (b *Batch) relocate(ctx context.Context, limit page.ID) error {
	budget := relocateOverflowMax
	var last head // of the value that was looked at last: its other pages are not read
	for _, id := range b.ck.LiveFrom(limit) {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if b.enough != nil && b.enough() {
			return nil
		}
		if b.s.fill.of(id) > 0 {
			if err := b.evacuate(id); err != nil {
				return err
			}
			continue
		}
		if budget <= 0 || last.has(id) {
			continue
		}
		// Only its contents tell whether the page belongs to a page array, to a blob or to the tree. Most pages of the tree are not in the list: the merge
		// has moved them.
		_, err := b.BlobPage(id)
		if errors.Is(err, pager.ErrCorrupt) {
			continue
		}
		if err != nil {
			return err
		}
		if page.ReadHeader(b.scratch).Type != page.TypeOverflow {
			continue
		}
		var moved int
		last.extents, moved, err = b.relocateOverflow(overflowOwner(b.scratch), id, limit)
		if err != nil && !errors.Is(err, pager.ErrCorrupt) {
			return err
		}
		budget -= moved
	}
	return nil
}

// relocateOverflow copies the overflow pages of the blob that page id belongs to, if all copies are then
// below limit. from is where they were, and nil if the blob does not have page id.
func (b *Batch) relocateOverflow(fragment uint64, id, limit page.ID) (from []pager.Extent, moved int, err error) {
	p := b.locationOf(fragment)
	if !p.live() {
		return nil, 0, nil // dropped or queued
	}
	if whole, err := b.whole(fragment, p); err != nil || !whole {
		return nil, 0, err
	}
	h, err := b.headFragment(fragment)
	if err != nil || !h.has(id) {
		return nil, 0, err
	}
	if _, err := b.BlobPage(p.page()); err != nil {
		return nil, 0, err
	}
	from = h.extents
	if err := b.checkOwner(&overflow{fragment, page.ReadHeader(b.scratch).Checkpoint, from}); err != nil {
		return nil, 0, err
	}
	for _, e := range from {
		moved += e.Count
	}
	h.extents = b.ck.AllocPieces(moved)
	if !h.below(limit) {
		return from, 0, nil // the pieces are freed at the end of the checkpoint
	}
	moving := h.encode()
	if err := b.copyOverflow(fragment, from, h.extents); err != nil {
		return from, moved, err
	}
	second, at, err := b.secondFragment(fragment, p)
	if err != nil {
		b.free(h.extents)
		return from, moved, err
	}
	b.free(from)
	if at != 0 {
		b.dropFragment(second, at)
	}
	b.subtract(p)
	b.enqueue(fragment, fragmentHead, moving)
	return from, moved, b.packWhileFull()
}

// whole reports whether the blob at p can be read. The second fragment of a cut blob may be queued, and
// has no page then. Such a blob moves with a later checkpoint.
func (b *Batch) whole(id uint64, p location) (bool, error) {
	if !p.continued() {
		return true, nil
	}
	fragment, err := b.s.readFragment(id, p, b)
	if err != nil {
		return false, err
	}
	return b.locationOf(binary.LittleEndian.Uint64(fragment.data)).live(), nil
}

// copyOverflow copies overflow pages. After an error it frees the copies.
func (b *Batch) copyOverflow(fragment uint64, from, to []pager.Extent) error {
	var targets []page.ID
	(&head{extents: to}).pages(func(id page.ID) { targets = append(targets, id) })
	var err error
	n := 0 // written
	(&head{extents: from}).pages(func(id page.ID) {
		if err == nil {
			_, err = b.BlobPage(id)
		}
		if err == nil {
			if err = b.writeOverflow(targets[n], fragment, b.scratch[overflowPayload:]); err == nil {
				n++
			}
		}
	})
	if err != nil {
		b.ck.Free(targets[:n]...)
	}
	return err
}

func (b *Batch) free(extents []pager.Extent) {
	(&head{extents: extents}).pages(func(id page.ID) { b.ck.Free(id) })
}

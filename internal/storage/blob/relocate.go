package blob

import (
	"encoding/binary"
	"errors"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// relocateOverflowMax bounds the bulk pages that one checkpoint moves down, beyond the first value.
const relocateOverflowMax = 2048

// relocate moves rows away from the pages at and behind limit: data pages give up their rows, values with bulk pages there are copied. What
// cannot be read stays.
func (b *Batch) relocate(limit page.ID) error {
	budget := relocateOverflowMax
	for _, id := range b.ck.LiveFrom(limit) {
		if b.s.fill.of(id) > 0 {
			if err := b.evacuate(id); err != nil {
				return err
			}
			continue
		}
		if budget <= 0 {
			continue
		}
		// A page of the tree, of a vector, or bulk: only it can say. There are a handful of them.
		if _, err := b.BlobPage(id); errors.Is(err, pager.ErrCorrupt) {
			continue
		} else if err != nil {
			return err
		}
		if page.ReadHeader(b.scratch).Type != page.TypeOverflow {
			continue
		}
		moved, err := b.relocateOverflow(overflowOwner(b.scratch), id, limit)
		if err != nil && !errors.Is(err, pager.ErrCorrupt) {
			return err
		}
		budget -= moved
	}
	return nil
}

// relocateOverflow copies the bulk pages of the row that page id belongs to, if that brings them all below limit.
func (b *Batch) relocateOverflow(row uint64, id, limit page.ID) (moved int, err error) {
	p := b.locationOf(row)
	if !p.live() {
		return 0, nil // dropped, or on the move already
	}
	if whole, err := b.whole(row, p); err != nil || !whole {
		return 0, err
	}
	h, err := b.headFragment(row)
	if err != nil || !h.has(id) {
		return 0, err
	}
	from := h.extents
	for _, e := range from {
		moved += e.Count
	}
	h.extents = b.ck.AllocPieces(moved)
	if !h.below(limit) {
		return 0, nil // the pieces return with the end of the checkpoint
	}
	moving := h.encode()
	if err := b.copyOverflow(row, from, h.extents); err != nil {
		return moved, err
	}
	tail, at, err := b.secondFragment(row, p)
	if err != nil {
		b.free(h.extents)
		return moved, err
	}
	b.free(from)
	if at != 0 {
		b.dropFragment(tail, at)
	}
	b.subtract(p)
	b.enqueue(row, fragmentHead, moving)
	return moved, b.packWhileFull()
}

// whole reports whether row id at p can be read: the second part of a row that was cut may be on the move, and has no page then. Such a row
// moves with a later checkpoint.
func (b *Batch) whole(id uint64, p location) (bool, error) {
	if !p.continued() {
		return true, nil
	}
	row, err := b.s.readFragment(id, p, b)
	if err != nil {
		return false, err
	}
	return b.locationOf(binary.LittleEndian.Uint64(row.data)).live(), nil
}

// copyOverflow copies bulk pages. After an error the copies are given up again.
func (b *Batch) copyOverflow(row uint64, from, to []pager.Extent) error {
	var targets []page.ID
	(&head{extents: to}).pages(func(id page.ID) { targets = append(targets, id) })
	var err error
	n := 0 // written
	(&head{extents: from}).pages(func(id page.ID) {
		if err == nil {
			_, err = b.BlobPage(id)
		}
		if err == nil {
			if err = b.writeOverflow(targets[n], row, b.scratch[overflowPayload:]); err == nil {
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

package blob

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

const (
	// packAt and packTo are the pages' worth of queued fragments at which packing begins and ends while
	// more may come. The fragments that remain let the next page be filled to the end.
	packAt = 8
	packTo = 4

	// packLookahead is how many queued fragments that do not fit are passed over for one that does.
	// Fragments that are near each other in key order should be near each other in the file, and 64
	// fragments of random length leave hardly a gap.
	packLookahead = 64

	// cutMin is the part of a page, as one over it, that justifies a cut: reading the blob then takes two
	// pages. Without cuts, values a little longer than half a page would leave the other half empty.
	cutMin = 4

	// runPages is how many neighbouring pages a batch takes at once.
	runPages = 16

	// Sparse pages are evacuated while less than fillMin of all blob pages is in use, at most
	// evacuateMin pages plus half the pages that the batch writes anyway. So the evacuation never costs more
	// than the work that it accompanies.
	fillMin     = 2.0 / 3
	evacuateMin = 16
)

// enqueue queues a copy of a fragment.
func (b *Batch) enqueue(id uint64, kind fragmentKind, data []byte) {
	if cap(b.arena)-len(b.arena) < len(data) {
		b.arena = make([]byte, 0, packAt*b.s.pageSize)
	}
	start := len(b.arena)
	b.arena = append(b.arena, data...)
	b.queue = append(b.queue, queuedFragment{id, kind, b.arena[start:len(b.arena):len(b.arena)]})
	b.queued += cost(len(data), b.s.pageSize)
	b.changes[id] = locationQueued
}

func (b *Batch) packWhileFull() error {
	if b.queued < packAt*b.s.fill.capacity {
		return nil
	}
	for b.queued > packTo*b.s.fill.capacity {
		if err := b.packPage(); err != nil {
			return err
		}
	}
	return nil
}

// packPage writes one page with the first queued fragment, the fragments of the partly filled page that
// fits it best, and every other queued fragment that still fits.
func (b *Batch) packPage() error {
	id := b.takePage()
	old, fill, err := b.pageToFill(cost(len(b.queue[0].data), b.s.pageSize))
	if err != nil {
		return err
	}
	buf, err := b.w.Page(id)
	if err != nil {
		return err
	}
	d := newBlobPage(buf, id, b.ck.Number())
	if fill {
		b.leave(old, func(r slotFragment) { b.put(&d, id, r.id, r.kind, r.data) })
	}
	b.fillUp(&d, id)
	d.seal()
	b.fresh[id] = d.cost
	return nil
}

// pageToFill reads the partly filled page that fits best. It skips pages that cannot be read.
func (b *Batch) pageToFill(cost int) (page.ID, bool, error) {
	for {
		id, ok := b.s.fill.best(cost)
		if !ok {
			return 0, false, nil
		}
		if readable, err := b.open(id); readable || err != nil {
			return id, readable, err
		}
	}
}

// open reads blob page id into scratch and checks that it holds the fragments that it should hold. It
// reports false if the page cannot be read, or holds others, as after a write that the device has lost. The
// fragments of such a page stay where they are: that is damage for their readers, and no reason to stop a
// checkpoint.
func (b *Batch) open(id page.ID) (readable bool, err error) {
	if _, err = b.BlobPage(id); err == nil {
		err = b.checkFragments(id)
	}
	if errors.Is(err, pager.ErrCorrupt) {
		b.s.fill.exclude(id)
		return false, nil
	}
	return err == nil, err
}

// checkFragments compares the live fragments of blob page id, which scratch holds, with its fill.
func (b *Batch) checkFragments(id page.ID) error {
	fragments, err := fragmentCount(b.scratch)
	live := 0
	for slot := 0; err == nil && slot < fragments; slot++ {
		var r slotFragment
		if r, err = fragmentAt(b.scratch, slot, fragments); err != nil {
			break
		}
		if p := b.locationOf(r.id); p.live() && p.page() == id && p.slot() == slot {
			live += p.cost()
		}
	}
	if want := b.s.fill.of(id); err == nil && live != want {
		err = fmt.Errorf("%w: live fragments take %d bytes, expected %d", errMalformed, live, want)
	}
	if err != nil {
		return b.s.pager.Corrupt(id, err.Error())
	}
	return nil
}

// fillUp adds queued fragments while they fit, and the first one in any case.
func (b *Batch) fillUp(d *blobPage, id page.ID) {
	kept := b.queue[:0]
	for i := range b.queue {
		r := &b.queue[i]
		c := cost(len(r.data), b.s.pageSize)
		if c > d.room() || len(kept) >= packLookahead {
			kept = append(kept, *r)
			continue
		}
		b.queued -= c
		b.put(d, id, r.id, r.kind, r.data)
	}
	b.queue = kept
	if len(kept) > 0 {
		b.cut(d, id, &kept[0])
	}
}

// cut writes as much of a queued fragment as fits into the rest of a page, and queues the remaining
// bytes as its second fragment. A fragment is cut once.
func (b *Batch) cut(d *blobPage, id page.ID, r *queuedFragment) {
	whole := cost(len(r.data), b.s.pageSize)
	if d.room() < b.s.fill.capacity/cutMin || whole <= d.room() || r.kind != fragmentWhole && r.kind != fragmentHead {
		return
	}
	second, first := b.newID(), d.room()-entrySize-secondIDSize
	b.fragment = append(binary.LittleEndian.AppendUint64(b.fragment[:0], second), r.data[:first]...)
	b.put(d, id, r.id, r.kind|fragmentContinued, b.fragment)
	*r = queuedFragment{second, fragmentSecond, r.data[first:]}
	b.queued += cost(len(r.data), b.s.pageSize) - whole
	b.changes[second] = locationQueued
}

func (b *Batch) put(d *blobPage, id page.ID, fragment uint64, kind fragmentKind, data []byte) {
	slot := d.add(fragment, kind, data)
	b.changes[fragment] = makeLocation(id, slot, cost(len(data), b.s.pageSize), kind)
}

func (b *Batch) takePage() page.ID {
	if b.run.Count == 0 {
		b.run = b.ck.AllocExtent(runPages)
	}
	id := b.run.First
	b.run = pager.Extent{First: id + 1, Count: b.run.Count - 1}
	return id
}

// leave frees blob page id, which open has read, and calls each with its live fragments.
func (b *Batch) leave(id page.ID, each func(r slotFragment)) {
	fragments, _ := fragmentCount(b.scratch) // open has checked all of it
	for slot := range fragments {
		r, _ := fragmentAt(b.scratch, slot, fragments)
		if p := b.locationOf(r.id); p.live() && p.page() == id && p.slot() == slot {
			each(r)
		}
	}
	b.s.fill.set(id, 0)
	b.ck.Free(id)
}

// evacuate queues the fragments of a blob page, if it can be read.
func (b *Batch) evacuate(id page.ID) error {
	if readable, err := b.open(id); !readable {
		return err
	}
	b.leave(id, func(r slotFragment) { b.enqueue(r.id, r.kind, r.data) })
	return b.packWhileFull()
}

// moves is which fragments Finish moves.
type moves struct {
	keepSparse bool        // see KeepSparse
	enough     func() bool // see MoveUntil; nil for never
}

// KeepSparse leaves sparse pages as they are: their fragments would take pages before any are freed.
func (b *Batch) KeepSparse() { b.keepSparse = true }

// MoveUntil lets Finish move no more fragments off pages at the end of the file as soon as enough reports true: something waits for the checkpoint.
func (b *Batch) MoveUntil(enough func() bool) { b.enough = enough }

// evacuateSparse reads each of the pages: after a bulk load, half as many as that has written.
func (b *Batch) evacuateSparse(ctx context.Context) error {
	if b.keepSparse {
		return nil
	}
	for n := evacuateMin + (b.s.fill.relieved+len(b.fresh))/2; n > 0 && b.s.fill.factor() < fillMin; n-- {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		id, ok := b.s.fill.sparsest()
		if !ok {
			break
		}
		if err := b.evacuate(id); err != nil {
			return err
		}
	}
	return nil
}

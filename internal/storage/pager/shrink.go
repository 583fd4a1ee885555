package pager

import (
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// The file shrinks in two motions. A checkpoint moves some of the last live pages to lower addresses (Tail says which; the tree
// and the row store rewrite them as they rewrite anything). Once the end is free and nobody reads there any more, Shrink cuts it.
//
// Cutting needs no order towards syncs: the durable superblock counts pages only up to its last live one, and Shrink cuts behind every
// page that is live or pending, so that whether the cut survives a crash does not matter.

// holeShareMin is the part of the file, as one over it, that must lie in holes before pages move. An eighth is what growing
// and cutting in steps waste anyway.
const holeShareMin = 8

// RelocateFrom is the page at and behind which live pages should move to lower addresses: at most k of them are there. It is zero when the
// holes before them are not worth it. Map pages among them move with the commit; the caller moves the others.
func (ck *Checkpoint) RelocateFrom(k int) page.ID {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	space := ck.p.space
	end := int(space.end())
	holes := end - space.busy.Count()
	if holes < growPagesMin || holes < end/holeShareMin {
		return 0
	}
	// Behind the place where the file would end without holes, and a little more: a page that moves is in two places for a while.
	// The copies of the superblocks are no part of it: they move by themselves.
	floor := max(space.busy.Count()+k, int(copyHome(ck.p.pageSize))+superblocks)
	limit := end
	for range k {
		last := space.live.Last(limit)
		if last < floor {
			break
		}
		limit = last
	}
	if limit == end {
		return 0
	}
	ck.limit = page.ID(limit)
	return ck.limit
}

// LiveFrom lists the live pages at and behind limit, ascending.
func (ck *Checkpoint) LiveFrom(limit page.ID) []page.ID {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	var ids []page.ID
	live := &ck.p.space.live
	for i := live.Next(int(limit)); i < live.Len(); i = live.Next(i + 1) {
		ids = append(ids, page.ID(i))
	}
	return ids
}

// Shrink applies releases and cuts the free end of the file, if it is worth it. It keeps one growth step, and does nothing until two
// are free, so that a store that breathes does not grow and shrink by turns. During a checkpoint it does nothing.
func (p *Pager) Shrink() error {
	if err := p.Err(); err != nil {
		return err
	}
	if !p.open.CompareAndSwap(false, true) {
		return nil
	}
	defer p.open.Store(false)
	if err := p.rewriteSuperblock(); err != nil {
		return err
	}
	p.applyReuse()
	defer p.publishStats()
	need := p.offset(max(p.space.end(), p.current().pageCount))
	step := p.growStep(need)
	p.growMu.Lock()
	defer p.growMu.Unlock()
	to := max(need+step, p.offset(page.ID(p.space.busy.Count()))+p.reserve.Load())
	if p.fileSize.Load() > to+step {
		if err := p.file.Truncate(to); err != nil {
			return p.fail(fmt.Errorf("cutting the file to %d bytes: %w", to, err))
		}
		p.fileSize.Store(to)
	}
	return nil
}

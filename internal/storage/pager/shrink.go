package pager

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// The file shrinks in two steps. A checkpoint moves some of the last live pages to lower addresses:
// RelocateFrom says which, and the tree and the blob store rewrite them like any other page. Once the
// file end is free and has no readers, Shrink truncates the file.
//
// The truncation has no required order relative to syncs: the durable superblock counts pages only up to
// its last live one, and Shrink truncates after every page that is live or pending. So it does not matter
// whether the truncation survives a crash.

// holeShareMin is the part of the file, as one over it, that must be holes before pages move. Growing
// and truncating in steps waste an eighth anyway.
const holeShareMin = 8

// RelocateFrom returns the page at and past which live pages should move to lower addresses: at most k
// live pages are there. It is zero if the holes before them are too few. Map pages among them move with
// the commit; the caller moves the others.
func (ck *Checkpoint) RelocateFrom(k int) page.ID {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	space := ck.p.space
	end := int(space.end())
	holes := end - space.busy.Count()
	if holes < growPagesMin || holes < end/holeShareMin {
		return 0
	}
	// The floor is where the file would end without holes, and a little more: a page that moves has two
	// locations for a while. The copies of the superblocks are excluded, because they move by themselves.
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

// LiveFrom lists the live pages at and past limit, ascending, without those that the checkpoint has freed.
func (ck *Checkpoint) LiveFrom(limit page.ID) []page.ID {
	ck.mu.Lock()
	defer ck.mu.Unlock()
	var ids []page.ID
	var freed bitset.Set
	for _, id := range ck.freed {
		if id >= limit {
			freed.Add(int(id - limit))
		}
	}
	live := &ck.p.space.live
	for i := live.Next(int(limit)); i < live.Len(); i = live.Next(i + 1) {
		if !freed.Has(i - int(limit)) {
			ids = append(ids, page.ID(i))
		}
	}
	return ids
}

// Shrink applies the allowed reuse, and truncates the free end of the file if that is worth it. It leaves
// one growth step, and does nothing until two are free, so that a store whose size varies does not grow
// and shrink in turn. It also leaves the free pages of the reserve, and as many bytes more as unwritten says: of what
// will be written soon. During a checkpoint it does nothing. A full device, which on some file systems cannot
// even truncate a file, leaves the file as it is.
func (p *Pager) Shrink(unwritten func() int64) error {
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
	to := max(need+step, p.offset(page.ID(p.space.busy.Count()))+p.reserve.bytes.Load()+unwritten())
	if p.fileSize.Load() > to+step {
		err := p.file.Truncate(to)
		if errors.Is(err, vfs.ErrNoSpace) {
			return nil // the next Shrink tries again
		}
		if err != nil {
			return p.fail(fmt.Errorf("truncate the file to %d bytes: %w", to, err))
		}
		p.fileSize.Store(to)
	}
	return nil
}

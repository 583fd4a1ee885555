package pager

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Assertions of the pager. The cheap ones are in all builds: they stop the pager with ErrBroken, before the superblock is
// written if they can. Those that count or read everything are in builds with the tag `invariants`, and panic (invariants.Fail).

// noteBroken records the first invariant that is found broken. No checkpoint commits after it.
func (s *space) noteBroken(format string, args ...any) {
	if s.broken == nil {
		s.broken = fmt.Errorf(format, args...)
	}
}

// Fail stops the pager because the owner of some pages has found an invariant of its own broken. The checkpoint cannot be
// committed any more.
func (ck *Checkpoint) Fail(cause error) error { return ck.p.fail(brokenf("%w", cause)) }

// checkSuperblock compares a superblock, and the pages to which it is about to be written, with the current state.
func (ck *Checkpoint) checkSuperblock(next *superblock, pages []page.ID) error {
	old, live := ck.p.current(), &ck.p.space.live
	switch {
	case ck.p.space.broken != nil:
		return brokenf("%w", ck.p.space.broken)
	case next.checkpoint != old.checkpoint+1:
		return brokenf("checkpoint %d would follow checkpoint %d", next.checkpoint, old.checkpoint)
	case next.state.Epoch < old.state.Epoch:
		return brokenf("epoch %d would follow epoch %d", next.state.Epoch, old.state.Epoch)
	}
	for _, root := range []page.ID{next.allocation.Page, next.blobs.Table.Page, next.copy, next.nextCopy} {
		if root != 0 && !live.Has(int(root)) {
			return brokenf("page %d, which the superblock names, is not live", root)
		}
	}
	for _, at := range pages {
		if slices.Contains(old.locations(), at) {
			return brokenf("superblock %d would overwrite superblock %d on page %d", next.checkpoint, old.checkpoint, at)
		}
	}
	return nil
}

// checkHeader checks that buf is about to be written where it belongs.
func (ck *Checkpoint) checkHeader(id page.ID, buf []byte) error {
	if h := page.ReadHeader(buf); h.ID != id || h.Checkpoint != ck.number {
		return brokenf("page %d of checkpoint %d would be written as page %d of checkpoint %d", h.ID, h.Checkpoint, id, ck.number)
	}
	return nil
}

// checkWritten panics if a page that was written is not intact, or if the last of them reads back different. A failed read proves
// nothing. One page is read for each window, so that tests with slow reads still have checkpoints that keep up.
func (p *Pager) checkWritten(ids []page.ID, slab []byte) {
	if !invariants.Enabled {
		return
	}
	for i, id := range ids {
		if err := page.Check(slab[i*p.pageSize:(i+1)*p.pageSize], id); err != nil {
			invariants.Fail("pager: page %d was written and is not intact: %v", id, err)
		}
	}
	last := len(ids) - 1
	buf := vfs.AlignedBuffer(p.pageSize)
	if _, err := p.file.ReadAt(buf, p.offset(ids[last])); err == nil && !bytes.Equal(buf, slab[last*p.pageSize:(last+1)*p.pageSize]) {
		invariants.Fail("pager: page %d was written and reads back different", ids[last])
	}
}

// checkSpace panics if live, pending and free pages are not disjoint and complete after a checkpoint, or if a page is still taken.
func (p *Pager) checkSpace() {
	if !invariants.Enabled {
		return
	}
	if err := p.auditSpace(); err != nil {
		invariants.Fail("pager: after a checkpoint: %v", err)
	}
}

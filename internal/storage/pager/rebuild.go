package pager

import (
	"encoding/binary"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// The allocation map and the indirection table can be rebuilt from what they describe, so that damage to
// one of their pages costs no data. Their owners do so when the file is opened. The next checkpoint writes
// them again, completely.

// MapDamage is why the allocation map cannot be read, or nil. No checkpoint begins before RebuildMap.
func (p *Pager) MapDamage() error {
	if err := p.mapDamage.Load(); err != nil {
		return *err
	}
	return nil
}

// DistrustMap lets the allocation map count as damaged, before the first checkpoint.
func (p *Pager) DistrustMap(cause error) { p.mapDamage.Store(&cause) }

// DistrustTable says that the indirection table is rebuilt from all pages of the file, because the map counts as damaged, too: see RebuildMap.
func (p *Pager) DistrustTable() {
	sb := p.current()
	for _, root := range []page.ID{sb.allocation.Page, sb.blobs.Table.Page} {
		if root >= superblocks && root < sb.pageCount {
			p.replacedRoots = append(p.replacedRoots, root)
		}
	}
}

// RebuildMap replaces an allocation map that cannot be read. reachable calls its argument for every page
// that the tree and the blob store reach, any number of times. It reports whether all of them could be
// read. If not, every page of the file counts as live, because pages that seem free may be reachable. The
// next checkpoint writes the map.
//
// If the table was rebuilt, too, it may name other copies of values than the durable state does, whose pages are free then. What
// could not be read may be readable for the next start, which would look for values on these pages if this process dies in its
// first checkpoint. So the roots of both are overwritten before any other page is: see rewriteSuperblock.
func (p *Pager) RebuildMap(reachable func(each func(page.ID) error) (complete bool, err error)) error {
	if !p.open.CompareAndSwap(false, true) {
		return ErrBusy
	}
	defer p.open.Store(false)
	sb := p.current()
	space := newSpace(newLive())
	add := func(id page.ID) error {
		if id < superblocks || id >= sb.pageCount {
			return brokenf("page %d of %d is reachable", id, sb.pageCount)
		}
		space.busy.Add(int(id))
		space.live.Add(int(id))
		return nil
	}
	complete, err := reachable(add)
	if err != nil {
		return err
	}
	allocation := p.PartialArray(ArrayAllocationMap, sb.allocation, p.mapLeaves(sb.pageCount), func(page.ID) bool { return true })
	allocation.Pages(func(id page.ID) { _ = add(id) }) // they were checked when they were read
	if sb.copy != 0 {
		if err := add(sb.copy); err != nil {
			return err
		}
		if err := add(sb.nextCopy); err != nil {
			return err
		}
	}
	for id := page.ID(superblocks); !complete && id < sb.pageCount; id++ {
		if err := add(id); err != nil {
			return err
		}
	}
	for leaf := range allocation.leaves() {
		space.dirtyWords.Add(leaf * ArrayLeafBytes(p.pageSize) / 8)
	}
	if !complete {
		p.replacedRoots = nil
	}
	p.space, p.allocation = space, allocation
	p.mapDamage.Store(nil)
	p.publishStats()
	return nil
}

// PartialArray returns a stored page array as far as its nodes can be read. The next update must write
// all of its leaves. An older node, as after a write that the device has lost, names pages that others have by
// now, or that are not live: they are left out.
func (r *Reader) PartialArray(kind ArrayKind, root ArrayRoot, leaves int, live func(page.ID) bool) *PageArray {
	v := &PageArray{kind: kind, size: r.pageSize}
	for _, n := range v.shape(leaves) {
		v.levels = append(v.levels, make([]page.ID, n))
	}
	top := len(v.levels) - 1
	if top < 0 || root.Page < superblocks || root.Page >= r.current().pageCount {
		return v
	}
	v.levels[top][0] = root.Page
	buf := vfs.AlignedBuffer(r.pageSize)
	for level := top; level >= 0; level-- {
		for i, id := range v.levels[level] {
			switch {
			case id == 0 || r.ReadPage(id, buf) != nil:
			case v.checkNode(buf, level, i) != nil:
				if level < top { // the root is what the superblock says
					v.levels[level][i] = 0
				}
			case level > 0:
				v.readableChildren(r, level, i, buf[arrPayload:], live)
			}
		}
	}
	return v
}

// readableChildren takes the ids of a node's children, except impossible ones.
func (v *PageArray) readableChildren(r *Reader, level, index int, payload []byte, live func(page.ID) bool) {
	below := v.levels[level-1]
	for c := index * v.fanout(); c < min((index+1)*v.fanout(), len(below)); c++ {
		if id := page.ID(binary.LittleEndian.Uint64(payload)); id >= superblocks && id < r.current().pageCount && live(id) {
			below[c] = id
		}
		payload = payload[8:]
	}
}

package pager

import (
	"fmt"

	"github.com/epochkv/epochkv/internal/vfs"
)

// Certain reports whether the newest superblock is certainly on the device: see MakeCertain.
func (p *Pager) Certain() bool { return p.resynced.Load() }

// MakeCertain makes the newest superblock durable for certain, as each checkpoint does first. Before that
// nothing outside the data file may be removed that only older states need. ErrBusy during a checkpoint.
func (p *Pager) MakeCertain() error {
	if err := p.Err(); err != nil {
		return err
	}
	if !p.open.CompareAndSwap(false, true) {
		return ErrBusy
	}
	defer p.open.Store(false)
	return p.rewriteSuperblock()
}

// rewriteSuperblock makes the superblock that Open has read durable, before the first checkpoint builds
// on it. Open may have read it from the kernel's page cache. After a failed sync and a restart of the
// process, the cached superblock reads as it was written, later syncs report success without writing it,
// and a crash loses it. A checkpoint would then reuse pages that the older state needs, and the log that
// it needs would be truncated. So the same bytes are written to the same pages again, and synced. The
// pages that the superblock names were synced before it was written for the first time.
//
// A newer superblock may be damaged, with its copy. If it could be read again later, it would name pages that the
// checkpoints from here on, of which the first has the same number, have overwritten. So its places are overwritten
// with the same sync, and so are the roots of tables that were rebuilt (see RebuildMap).
//
// A full device leaves the state as it is, and the next checkpoint tries again. The caller has set open.
func (p *Pager) rewriteSuperblock() error {
	if p.resynced.Load() {
		return nil
	}
	sb := p.current()
	pages := sb.locations()
	if p.missing && sb.nextCopy != 0 { // the page may have the same superblock until the successor is there: see encode
		pages = append(pages, sb.nextCopy)
	}
	err := p.writeSuperblock(sb, pages...)
	if err == nil && p.missing {
		_, err = p.file.WriteAt(vfs.AlignedBuffer(p.pageSize), p.offset(sb.otherSlot()))
	}
	for _, root := range p.replacedRoots {
		if err == nil {
			_, err = p.file.WriteAt(vfs.AlignedBuffer(p.pageSize), p.offset(root))
		}
	}
	if err == nil {
		err = p.sync(p.file.Sync, p.failed)
	}
	if err != nil {
		return fmt.Errorf("write the newest superblock again: %w", p.failed(err))
	}
	p.resynced.Store(true)
	return nil
}

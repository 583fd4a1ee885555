package pager

import (
	"fmt"
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
// A full device leaves the state as it is, and the next checkpoint tries again. The caller has set open.
func (p *Pager) rewriteSuperblock() error {
	if p.resynced.Load() {
		return nil
	}
	err := p.writeSuperblock(p.current(), p.current().locations()...)
	if err == nil {
		err = p.sync(p.file.Sync, p.failed)
	}
	if err != nil {
		return fmt.Errorf("write the newest superblock again: %w", p.failed(err))
	}
	p.resynced.Store(true)
	return nil
}

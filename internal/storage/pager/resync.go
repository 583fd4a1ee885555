package pager

import (
	"fmt"
)

// rewriteSuperblock makes durable what Open has read, before the first checkpoint builds on it. Open may have read the newest superblock from the
// kernel's page cache: after a failed sync, and a new start of the process, it reads as it was written, later syncs report
// success without writing it, and a crash loses it. A checkpoint would use again the pages that the older state needs, and the
// log that it needs would be given up. So the superblock is written again, the same bytes at the same places, and synced. What it
// names was synced before it was written at all.
//
// A full device leaves the state as it is, and the next checkpoint tries again. The caller holds open.
func (p *Pager) rewriteSuperblock() error {
	if p.resynced {
		return nil
	}
	err := p.writeSuperblock(p.current(), p.current().locations()...)
	if err == nil {
		err = p.file.Sync()
	}
	if err != nil {
		return fmt.Errorf("write the newest superblock again: %w", p.failed(err))
	}
	p.resynced = true
	return nil
}

package pager

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// The reserve is a number of free pages whose blocks the file holds: holes between live pages, and what is
// allocated after the last of them. A checkpoint on a full device takes pages from it. It exists for
// deletions, which write pages before they free any.

type pageReserve struct {
	bytes  atomic.Int64 // of free pages that the file should hold
	hollow atomic.Bool  // see Hollow
	filled bool         // fillHoles has nothing to do; guarded by growMu
}

// SetReserve sets how many bytes of free pages the file should hold. Shrink leaves them.
func (p *Pager) SetReserve(bytes int64) { p.reserve.bytes.Store(bytes) }

// FreeBytes returns how many bytes of free pages the file holds, and how many it should hold. Pages that
// the running checkpoint has taken count as free.
func (p *Pager) FreeBytes() (free, want int64) {
	return p.fileSize.Load() - int64(p.stats.Load().busy)*int64(p.pageSize), p.reserve.bytes.Load()
}

// FillReserve allocates at the end of the file the bytes that free pages lack for the reserve, and more
// bytes in addition, after the blocks of free pages that are holes (fillHoles). It syncs the file, so that a crash
// does not give the space to other files. The error matches vfs.ErrNoSpace while there is no space. A failed
// sync is final, because pages of a checkpoint may be missing on the device then.
func (p *Pager) FillReserve(more int64) error {
	p.growMu.Lock()
	defer p.growMu.Unlock()
	if err := p.fillHoles(); err != nil {
		return err
	}
	free, want := p.FreeBytes()
	want += more
	if free >= want {
		return nil
	}
	size := (p.fileSize.Load() + want - free + int64(p.pageSize) - 1) / int64(p.pageSize) * int64(p.pageSize)
	if err := p.file.Preallocate(size); err != nil {
		return fmt.Errorf("pager: reserve of %d bytes: %w", want, err)
	}
	p.fileSize.Store(size)
	return p.syncReserve()
}

func (p *Pager) syncReserve() error {
	return p.sync(p.file.Sync, func(err error) error { return p.fail(fmt.Errorf("reserve: %w", err)) })
}

// fillHoles allocates the whole file, once. The free pages of a file that was restored, or of a sparse copy, are holes: the
// file system has no blocks for them, and on a full disk no page could be written there. Where a file system cannot
// allocate, it is as it is. growMu is held.
func (p *Pager) fillHoles() error {
	if p.reserve.filled {
		return nil
	}
	err := vfs.Preallocate(p.file, p.fileSize.Load())
	if p.reserve.hollow.Store(errors.Is(err, vfs.ErrNoSpace)); err == nil {
		err = p.syncReserve()
	}
	if err != nil {
		return fmt.Errorf("pager: free pages without blocks: %w", err)
	}
	p.reserve.filled = true
	return nil
}

// Hollow reports whether free pages are known to be holes for which the device has no space: they are no reserve.
func (p *Pager) Hollow() bool { return p.reserve.hollow.Load() }

// ErrKept means that a checkpoint would add pages to the state, and that too few would stay free. It comes
// with vfs.ErrNoSpace.
var ErrKept = errors.New("the free pages that are left are kept for deletions")

// KeepFree makes sure that this many bytes of pages stay free if the checkpoint adds pages to the state.
// All pages of the checkpoint must have been written. KeepFree lets the file grow, or says with
// vfs.ErrNoSpace that the checkpoint should be aborted. Pages that readers still need count as taken.
func (ck *Checkpoint) KeepFree(bytes int64) error {
	ck.mu.Lock()
	late, space := len(ck.written)-len(ck.freed), ck.p.space
	added := late + len(ck.madeLive) - len(ck.freedLive)
	used := space.live.Count() + space.pendingCount() + late
	ck.mu.Unlock()
	if added <= 0 || bytes == 0 {
		return nil
	}
	size := ck.p.offset(page.ID(used)) + bytes
	if ck.p.fileSize.Load() >= size {
		return nil
	}
	if err := ck.p.growTo(size); err != nil {
		return fmt.Errorf("%w: %d pages more, %d bytes to be left free: %w", ErrKept, added, bytes, err)
	}
	return nil
}

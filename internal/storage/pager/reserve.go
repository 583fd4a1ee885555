package pager

import (
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// The reserve is a number of free pages whose blocks the file holds: holes between live pages, and what is allocated behind the last of them. A
// checkpoint on a full device takes from it. It is there for deletions, which write pages before they give any back.

// SetReserve says how many bytes of free pages the file should hold. Shrink leaves so many.
func (p *Pager) SetReserve(bytes int64) { p.reserve.Store(bytes) }

// FreeBytes is how many bytes of free pages the file holds, and how many it should. Pages that a checkpoint under way has taken count as free.
func (p *Pager) FreeBytes() (free, want int64) {
	return p.fileSize.Load() - int64(p.stats.Load().busy)*int64(p.pageSize), p.reserve.Load()
}

// FillReserve allocates at the end of the file what free pages lack for the reserve and so many bytes more. It does so for good: a crash must not give
// the space to others. The error matches
// vfs.ErrNoSpace while there is no space. A failed sync is final, since pages of a checkpoint may have been lost with it.
func (p *Pager) FillReserve(more int64) error {
	p.growMu.Lock()
	defer p.growMu.Unlock()
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
	if err := p.file.Sync(); err != nil {
		return p.fail(fmt.Errorf("reserve: %w", err))
	}
	return nil
}

// ErrKept means that a checkpoint would add pages to the state, and that too few would stay free. It comes with vfs.ErrNoSpace.
var ErrKept = errors.New("the free pages that are left are kept for deletions")

// KeepFree makes sure that so many bytes of pages stay free if the checkpoint, in which everything is written, adds pages to the state: it lets
// the file grow, or says with vfs.ErrNoSpace that the checkpoint should be given up. What readers still hold counts as taken.
func (ck *Checkpoint) KeepFree(bytes int64) error {
	ck.mu.Lock()
	added, space := len(ck.written)-len(ck.freed), ck.p.space
	used := space.live.Count() + space.pendingCount() + added
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

package storage

import (
	"maps"
	"slices"
	"sync"

	"github.com/epochkv/epochkv/internal/storage/pager"
)

// checkpointPins keep the pages of older states for readers that run for minutes, such as a verification. The guard of a slot
// would keep them, too, but while a reader is inside a guard no memtable is freed either, and writers would soon wait for
// memory.
//
// Invariant: the pager has been told to release pages through checkpoint n only if n is not past any pinned checkpoint. What no pinned state
// reaches goes nevertheless (pager.ReleaseBeside).
type checkpointPins struct {
	mu     sync.Mutex
	pinned map[uint64]int // by checkpoint: how many
	target uint64         // checkpoint whose freed pages no reader in a slot can reach any more
}

// pin keeps every page that the state of checkpoint n reaches. checkpointState.mu is held, so that n is the newest.
func (r *checkpointPins) pin(p *pager.Pager, n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pinned == nil {
		r.pinned = make(map[uint64]int)
	}
	r.pinned[n]++
	r.releaseLocked(p)
}

// unpin ends what pin began.
func (r *checkpointPins) unpin(p *pager.Pager, n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pinned[n]--; r.pinned[n] == 0 {
		delete(r.pinned, n)
	}
	r.releaseLocked(p)
}

// release records that no reader in a slot can reach the pages that checkpoint n freed.
func (r *checkpointPins) release(p *pager.Pager, n uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.target = max(r.target, n)
	r.releaseLocked(p)
}

func (r *checkpointPins) releaseLocked(p *pager.Pager) {
	through := r.target
	for n := range r.pinned {
		through = min(through, n)
	}
	p.ReuseAllFreed(through)
	p.ReuseFreed(r.target, slices.Collect(maps.Keys(r.pinned)))
}

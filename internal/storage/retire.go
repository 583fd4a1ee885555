package storage

import (
	"sync"
	"sync/atomic"
)

// retired is what checkpoints have made superfluous: memtables, and pages of the tree. It goes when the readers of the views before have moved
// on, which a merge that is under way need not end for: it has a lock of its own.
type retired struct {
	bytes atomic.Int64 // of the memtables

	mu   sync.Mutex // taken before Engine.mu
	list []retirement
}

// retirement is what one checkpoint made superfluous.
type retirement struct {
	tick        uint64
	checkpoint  uint64
	generations []*generation
	bytes       int64        // of their tables then: a writer that comes too late may still make one grow
	quarantine  *quarantined // nil if it stayed
}

// retire leaves what checkpoint number merged, and the pages that it freed, to Reclaim. No new reader finds them any more, and their bytes count as
// retired already.
func (e *Engine) retire(number uint64, merged []*generation, bytes int64, replaced *quarantined) {
	e.memory.retired.mu.Lock()
	e.memory.retired.list = append(e.memory.retired.list, retirement{e.registry.Retire(), number, merged, bytes, replaced})
	e.memory.retired.mu.Unlock()
	e.Reclaim()
}

// any reports whether something waits for readers.
func (r *retired) any() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.list) > 0
}

// Reclaim frees the memtables and releases the pages that no reader can reach any more, and lets those go on who wait for memory.
func (e *Engine) Reclaim() {
	old := &e.memory.retired
	old.mu.Lock()
	defer old.mu.Unlock()
	if len(old.list) == 0 {
		return
	}
	oldest := e.registry.OldestTick()
	if old.list[0].tick >= oldest {
		return // nobody is to try again for nothing: he would have a checkpoint made, which would come back here
	}
	for len(old.list) > 0 && old.list[0].tick < oldest {
		r := old.list[0]
		old.list = old.list[1:]
		e.checkpoints.pins.release(e.pager, r.checkpoint)
		_ = e.broken(checkRetired(old.bytes.Add(-r.bytes)))
		for _, g := range r.generations {
			e.reuseOrFree(g.mem)
		}
		e.freeQuarantine(r.quarantine)
	}
	e.signalRoom()
}

// free frees all memtables; nobody reads any more.
func (r *retired) free(e *Engine) {
	for _, old := range r.list {
		for _, g := range old.generations {
			e.freed(g.mem.Free())
		}
		e.freeQuarantine(old.quarantine)
	}
}

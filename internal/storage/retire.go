package storage

import (
	"sync"
	"sync/atomic"
)

// retired is what no new reader can reach: memtables, and pages of the tree. It is freed when the readers of older views have
// left their guards. It has a lock of its own, so that this need not wait for a running merge.
type retired struct {
	bytes atomic.Int64 // of the memtables

	mu   sync.Mutex // taken before Engine.mu
	list []retirement
}

// retirement is what one checkpoint retired.
type retirement struct {
	tick        uint64
	checkpoint  uint64
	generations []*generation
	bytes       int64        // of their tables then: a writer whose reservation fails may still make one grow
	quarantine  *quarantined // nil if it stayed
}

// retire leaves the generations that a checkpoint merged, and the pages that it freed, to Reclaim. No new reader finds them,
// and their bytes are counted as retired already.
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

// Reclaim frees the memtables and pages that no reader can reach any more, and wakes writers that wait for memory.
func (e *Engine) Reclaim() {
	old := &e.memory.retired
	old.mu.Lock()
	defer old.mu.Unlock()
	if len(old.list) == 0 {
		return
	}
	oldest := e.registry.OldestTick()
	if old.list[0].tick >= oldest {
		return // a writer that was woken for nothing would request a checkpoint, which would call Reclaim again
	}
	for len(old.list) > 0 && old.list[0].tick < oldest {
		r := old.list[0]
		old.list = old.list[1:]
		e.checkpoints.pins.release(e.pager, r.checkpoint)
		for _, g := range r.generations {
			e.memory.pool.awaitPrefault(g.mem)
			_ = g.mem.Shrink() // in the pool it counts as a table of ordinary size; after an error, Reset tries again
		}
		_ = e.broken(checkRetired(old.bytes.Add(-r.bytes)))
		for _, g := range r.generations {
			g.next.Store(nil) // a session that does nothing keeps its generation, and would keep all that come after it
			e.reuseOrFree(g.mem)
			e.memory.reclaimed.Store(max(e.memory.reclaimed.Load(), g.end.Load()))
		}
		e.freeQuarantine(r.quarantine)
	}
	e.signalRoom()
}

// free frees all memtables, when there are no readers any more.
func (r *retired) free(e *Engine) {
	for _, old := range r.list {
		for _, g := range old.generations {
			e.freed(g.mem.Free())
		}
		e.freeQuarantine(old.quarantine)
	}
}

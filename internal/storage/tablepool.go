package storage

import (
	"context"
	"encoding/binary"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// tablePool prepares the next memtables. Taking new memory from the kernel, and in a virtual machine from its host, cost 22
// to 40 % of a commit in profiles, and a rotation that lays out the index of the next table stops every writer meanwhile. So
// the memory of merged tables is used again. The memory of the active table is prefaulted in the background, ahead of its
// writers. When it is half full the next table is prepared: laid out, and all of its memory prefaulted.
type tablePool struct {
	requested chan struct{} // capacity 1: the active table has taken another step of memory, or is half full
	slot      *pin.Slot     // of RunTablePool

	heads       atomic.Pointer[memtable.Heads] // learned from the newest table that had enough keys; nil before the first
	prefault    sync.Mutex                     // held while memory of prefaulting is taken
	prefaulting atomic.Pointer[memtable.Table] // set inside the guard of the slot under which it was found

	// Guarded by Engine.mu.
	pooled []*memtable.Table // merged by checkpoints, their memory still mapped
	next   *memtable.Table   // prepared; nil while there is none
	ready  uint64            // rotations that found a prepared table
}

func (e *Engine) tableConfig() memtable.Config {
	return memtable.Config{
		Bytes: int(e.memory.memtableBytes), Heads: e.memory.pool.heads.Load(), Prefix: []byte{byte(keys.SpaceUser)}, LongChain: e.options.Ablation.LongChain(longChainLength), Filling: e.memory.pool.requested,
		Obtain: e.options.Obtain, Expected: expectedRecords(time.Now()),
	}
}

// expectedRecords describes the keys of the requests of the next hours: the time of the id in milliseconds, of which the
// first two of six bytes change every fifty days, the third every five hours, and then the version and random bits.
func expectedRecords(now time.Time) *memtable.Expected {
	var at [8]byte
	binary.BigEndian.PutUint64(at[:], uint64(now.UnixMilli())<<16)
	const uuidVersion = 7 << 4
	every := memtable.ByteRange{Most: math.MaxUint8}
	return &memtable.Expected{
		Prefix: []byte{byte(keys.SpaceSystem), keys.SystemRequest, at[0], at[1]},
		Bytes:  []memtable.ByteRange{{Least: at[2], Most: at[2] + min(1, math.MaxUint8-at[2])}, every, every, every, {Least: uuidVersion, Most: uuidVersion | 0xf}, every},
	}
}

// newTable returns the prepared table, or makes one. The caller holds mu, or is Open.
func (e *Engine) newTable() (*memtable.Table, error) {
	if t := e.memory.pool.next; t != nil {
		e.memory.pool.next = nil
		e.memory.pool.ready++
		return t, nil
	}
	return e.makeTable(e.memory.pool.take())
}

// makeTable makes a table, in the memory of an old one unless that is nil.
func (e *Engine) makeTable(old *memtable.Table) (*memtable.Table, error) {
	if old != nil {
		return old.Reset(e.tableConfig())
	}
	return memtable.New(e.tableConfig())
}

// take returns a pooled table, or nil.
func (t *tablePool) take() *memtable.Table {
	n := len(t.pooled)
	if n == 0 {
		return nil
	}
	spare := t.pooled[n-1]
	t.pooled = t.pooled[:n-1]
	return spare
}

// RunTablePool prepares tables until ctx ends, the first one at once, and the first log segment that a rotation needs. Without it, each rotation makes its own.
func (e *Engine) RunTablePool(ctx context.Context) {
	defer e.memory.pool.slot.Free()
	for {
		if e.prefaultActive(e.memory.pool.slot) {
			e.prepareTable()
		}
		if s := e.view.Load().active.segment; s != nil { // nil after a bulk load, until the next commit
			e.log.PrepareAhead(s)
		}
		select {
		case <-ctx.Done():
			return
		case <-e.memory.pool.requested:
		}
	}
}

// prefaultActive takes memory for the active table, a little ahead of its writers, and reports whether the table is half
// full. An error is ignored: the writer that needs the memory gets it again. The guard of the slot is left before the kernel
// is asked, which may take tens of milliseconds: otherwise nothing could be reused meanwhile.
func (e *Engine) prefaultActive(slot *pin.Slot) (halfFull bool) {
	t := &e.memory.pool
	for {
		slot.Enter()
		active := e.view.Load().active.mem
		t.prefault.Lock()
		t.prefaulting.Store(active)
		slot.Leave()
		more, err := active.PrefaultAhead()
		halfFull = active.HalfFull()
		t.prefaulting.Store(nil)
		t.prefault.Unlock()
		if !more || err != nil {
			return halfFull
		}
	}
}

// awaitPrefault returns when the memory of table, which no view names and no reader reaches, is not being prefaulted.
func (t *tablePool) awaitPrefault(table *memtable.Table) {
	if t.prefaulting.Load() == table {
		t.prefault.Lock()
		t.prefault.Unlock() //nolint:staticcheck // the empty critical section is the point
	}
}

// prepareTable prepares the next table, if there is none, and memory for it. If that fails, the rotation tries again and
// returns the error.
func (e *Engine) prepareTable() {
	e.mu.Lock()
	if e.memory.pool.next != nil || len(e.memory.pool.pooled) == 0 && !e.affordsTableLocked(e.memory.immutableBytes.Load()) {
		e.mu.Unlock()
		return
	}
	old := e.memory.pool.take()
	e.mu.Unlock()
	e.learnHeads(e.memory.pool.slot)
	t, err := e.makeTable(old)
	if err != nil {
		return
	}
	if t.Prefault() != nil {
		e.freed(t.Free())
		return
	}
	e.mu.Lock()
	e.memory.pool.next = t
	e.mu.Unlock()
}

// learnHeads lets the tables to come tell keys apart as the active table shows that it is necessary.
func (e *Engine) learnHeads(slot *pin.Slot) {
	slot.Enter()
	defer slot.Leave()
	if heads := e.view.Load().active.mem.LearnHeads(); heads != nil {
		e.memory.pool.heads.Store(heads)
	}
}

// preparedTables is the number of rotations that found a prepared table.
func (e *Engine) preparedTables() uint64 {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.memory.pool.ready
}

// affordsTableLocked reports whether one more table, in addition to those that are immutable, retired or pooled, stays in
// the budget of immutable ones.
func (e *Engine) affordsTableLocked(budget int64) bool {
	kept := len(e.memory.pool.pooled) + 1
	if e.memory.pool.next != nil {
		kept++
	}
	return e.immutableBytesOf(e.view.Load())+int64(kept)*e.memory.memtableBytes <= budget
}

// reuseOrFree takes a table that no reader can reach any more, and that is not being prefaulted.
func (e *Engine) reuseOrFree(t *memtable.Table) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if budget := e.memory.immutableBytes.Load(); e.affordsTableLocked(budget) {
		e.memory.pool.pooled = append(e.memory.pool.pooled, t)
		_ = e.broken(checkPool(len(e.memory.pool.pooled), e.memory.memtableBytes, budget))
		return
	}
	e.freed(t.Free())
}

// trimPool frees the pooled tables for which the budget has become too small.
func (e *Engine) trimPool() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for t := e.memory.pool.take(); t != nil; t = e.memory.pool.take() {
		if e.affordsTableLocked(e.memory.immutableBytes.Load()) {
			e.memory.pool.pooled = append(e.memory.pool.pooled, t)
			return
		}
		e.freed(t.Free())
	}
}

// free frees all of them.
func (t *tablePool) free(e *Engine) {
	if t.next != nil {
		e.freed(t.next.Free())
	}
	for _, spare := range t.pooled {
		e.freed(spare.Free())
	}
}

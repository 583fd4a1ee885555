package storage

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"epochkv/internal/storage/keys"
	"epochkv/internal/storage/page"
	"epochkv/internal/storage/pager/rows"
	"epochkv/internal/vfs"
)

// A bulk load goes into the tree past log and memtable, in one checkpoint, at one epoch.
//
//  1. Add: entries are sorted into a run, in temporary files (spool). Nobody is held up.
//  2. ReserveLoad: under every key latch, so that no commit is between its check and its install, the active generation is sealed,
//     and the first record of the next one becomes the load's, void. So its epoch E is newer than everything frozen, and older than everything
//     that the new generation takes.
//  3. E is not marked as done. Visible stands at E-1 from now on: readers do not miss the load, they are in front of it. Commits
//     behind it are installed and wait; those that must look before they write wait before they look.
//  4. PublishLoad: one checkpoint merges the frozen generations and the run, whose versions carry E. Its superblock says that every
//     commit up to E is in the tree. When it is durable the new root is published, as after any checkpoint.
//  5. E is marked as done: readers from E on find the load in the tree.
//
// A crash before the superblock is durable leaves the old state and a void record: the load never happened. A crash after it leaves the
// new state, and replay starts behind E. Nothing in between can be seen. A load that fails is a void epoch.
//
// What commits wait for in step 3 is the merge alone: intake and sorting are over, and the memtables were merged just before. The other way,
// letting visible pass E and the load appear to later snapshots only, needs two roots and two sets of memtables for as long as an older
// snapshot lives, and a second test in each conflict check.

// ErrLoadBusy means that another bulk load is under way.
var ErrLoadBusy = errors.New("storage: another bulk load is under way")

// Load is a bulk load under way. It is for one goroutine.
type Load struct {
	engine *Engine
	spool  *spool
	closed bool
	bytes  uint64 // keys and values that were added

	run     *run // all entries, once prepared
	epoch   keys.Epoch
	durable bool
}

// loads is the engine's part of bulk loads.
type loads struct {
	open     atomic.Bool // there is one
	finished atomic.Uint64
	keys     atomic.Uint64
	bytes    atomic.Uint64
}

// NewLoad begins a bulk load. It ends with Close. There is one at a time: ErrLoadBusy.
func (e *Engine) NewLoad() (*Load, error) {
	if !e.loads.open.CompareAndSwap(false, true) {
		return nil, ErrLoadBusy
	}
	chunk := int(min(max(e.options.MemoryBytes/16, chunkBytesMin), chunkBytesMax))
	return &Load{engine: e, spool: newSpool(e.fs, e.options.Dir, e.pager.PageSize(), chunk)}, nil
}

// Add takes an entry; key is an internal key. It keeps neither slice. Of several entries with one key the last one counts.
func (l *Load) Add(key, value []byte) error {
	if n := len(key); n == 0 || n > page.KeySizeMax(l.engine.pager.PageSize()) || len(value) > rows.ValueMax {
		return fmt.Errorf("storage: bulk load: key of %d and value of %d bytes", n, len(value))
	}
	l.bytes += uint64(len(key) + len(value))
	return l.spool.add(key, value)
}

// Prepare ends the intake and sorts. It returns the number of keys.
func (l *Load) Prepare(ctx context.Context) (uint64, error) {
	r, err := l.spool.finish(ctx)
	if err != nil || r == nil {
		return 0, err
	}
	l.run = r
	return r.count, nil
}

// Close ends the load, whatever became of it, and removes what it needed.
func (l *Load) Close() error {
	if l.closed {
		return nil
	}
	l.closed = true
	err := l.spool.close()
	l.engine.loads.open.Store(false)
	if errors.Is(err, vfs.ErrCrashed) {
		return nil
	}
	return err
}

// Published reports whether the load is durable and can be read.
func (l *Load) Published() bool { return l.durable }

// ReserveLoad gives the load its epoch. No commit may be between its check and its install. It does not wait: a channel says that
// memory is full, and delivers when to try again.
func (e *Engine) ReserveLoad(l *Load) (epoch keys.Epoch, room <-chan struct{}, err error) {
	room, err = e.advance(nil, 0, func(next *generation) {
		claim, _ := next.segment.Reserve(0)
		next.segment.Fill(claim)
		l.epoch = claim.Epoch
	})
	return l.epoch, room, err
}

// PublishLoad merges the load into the tree and publishes it. Every epoch before the load's is installed. If Published says so the load
// has happened, even if an error is returned; and after ErrFailed nobody knows until the next start.
func (e *Engine) PublishLoad(ctx context.Context, l *Load, h Horizon) error {
	e.checkpointing.Lock()
	defer e.checkpointing.Unlock()
	e.Reclaim()
	start := time.Now()
	if err := e.merge(ctx, mergeJob{frozen: e.complete(h.Visible), load: l, horizon: h}); err != nil {
		e.refuseWaiters()
		return fmt.Errorf("bulk load: %w", e.damage(err, e.view.Load().root, nil))
	}
	e.counters.checkpointed(time.Since(start))
	e.loads.finished.Add(1)
	e.loads.keys.Add(l.run.count)
	e.loads.bytes.Add(l.bytes)
	// The older superblock does not know the load, and the log cannot bring it back: should the newer one be damaged, the store would open
	// without it. A second, empty checkpoint makes both know.
	return e.merge(context.WithoutCancel(ctx), mergeJob{horizon: h})
}

// loadCutBlocks is the distance of the keys at which a load is cut: thirty leaves or so of work.
const loadCutBlocks = 4

// cuts are keys at which workers can share the merge of a load.
func (r *run) cuts() [][]byte {
	var cuts [][]byte
	for i := loadCutBlocks; i < len(r.blocks); i += loadCutBlocks {
		cuts = append(cuts, r.blocks[i].first)
	}
	return cuts
}

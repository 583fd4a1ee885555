package storage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"epochkv/internal/pin"
	"epochkv/internal/storage/keys"
	"epochkv/internal/storage/memtable"
	"epochkv/internal/vfs"
	"epochkv/internal/wal"
)

// Errors of the engine.
var (
	// ErrMemoryFull means that frozen generations fill the memory budget.
	ErrMemoryFull = errors.New("storage: the memory budget is used up")
	// ErrFailed means that a write or sync of the log failed; no write is accepted any more.
	ErrFailed = wal.ErrFailed
)

// Engine is the durable, ordered, versioned map.
type Engine struct {
	// Constant after Open.
	options       Options
	fs            vfs.FS
	log           *wal.Log
	registry      *pin.Registry
	lock          io.Closer
	memtableBytes int64 // at which a generation is rotated
	frozenBytes   int64 // that frozen memtables may hold together
	pruner        *pruner

	view atomic.Pointer[view]

	mu        sync.Mutex // guards rotation and the publication of views; taken by no fast path
	spare     *memtable.Table
	rotations atomic.Uint64
	refused   atomic.Uint64 // writes turned away for lack of memory
}

// Open opens or creates the store in o.Dir and recovers what its log holds.
func Open(o Options, registry *pin.Registry) (*Engine, Recovery, error) {
	o.setDefaults()
	if err := o.FS.MkdirAll(o.Dir); err != nil {
		return nil, Recovery{}, err
	}
	lock, err := o.FS.Lock(o.lockPath())
	if err != nil {
		return nil, Recovery{}, err
	}
	e := &Engine{
		options: o, fs: o.FS, registry: registry, lock: lock, pruner: newPruner(),
		memtableBytes: o.MemtableBytes, frozenBytes: o.MemoryBytes - o.CacheBytes - 2*o.SegmentBytes - o.MemtableBytes,
	}
	recovery, err := e.recover()
	if err != nil {
		return nil, recovery, errors.Join(err, e.release())
	}
	return e, recovery, nil
}

// Close makes every commit durable and closes the files. No reader or writer may be inside.
func (e *Engine) Close() error {
	return errors.Join(e.log.Close(), e.release())
}

// release frees memory and the lock file.
func (e *Engine) release() error {
	if v := e.view.Load(); v != nil {
		v.active.mem.Free()
		for _, g := range v.frozen {
			g.mem.Free()
		}
	}
	if e.spare != nil {
		e.spare.Free()
	}
	return e.lock.Close()
}

// Err is nil, or why the engine takes no more writes. It wraps ErrFailed.
func (e *Engine) Err() error { return e.log.Err() }

// Durable is the newest epoch on stable storage.
func (e *Engine) Durable() keys.Epoch { return e.log.Durable() }

// WaitDurable returns when every commit through epoch is on stable storage.
func (e *Engine) WaitDurable(ctx context.Context, epoch keys.Epoch) error {
	return e.log.WaitDurable(ctx, epoch)
}

// Advance replaces the full generation that w met, or waits for whoever does. bodyBytes is what the caller wants to write: a
// larger record than a segment holds gets a segment of its own. Errors: ErrMemoryFull, vfs.ErrNoSpace, ErrFailed. The
// generation stays sealed then, and the next call tries again.
func (e *Engine) Advance(w *Writer, bodyBytes int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.view.Load()
	if v.active != w.generation || !v.active.sealed() {
		return nil // somebody has done it, or is between crossing the end and writing it down
	}
	if err := e.log.Err(); err != nil {
		return err
	}
	if e.frozenLocked(v) > e.frozenBytes {
		e.refused.Add(1)
		return ErrMemoryFull
	}
	next, err := e.newGenerationLocked(keys.Epoch(v.active.end.Load()), bodyBytes)
	if err != nil {
		return fmt.Errorf("rotate at epoch %d: %w", v.active.end.Load(), err)
	}
	frozen := append([]*generation{v.active}, v.frozen...)
	v.active.next.Store(next)
	e.view.Store(&view{active: next, frozen: frozen, root: v.root})
	e.rotations.Add(1)
	return nil
}

// frozenLocked is the memory that memtables would hold if the active one were frozen.
func (e *Engine) frozenLocked(v *view) int64 {
	total := int64(v.active.mem.Bytes())
	for _, g := range v.frozen {
		total += int64(g.mem.Bytes())
	}
	return total
}

func (e *Engine) newGenerationLocked(first keys.Epoch, bodyBytes int) (*generation, error) {
	mem, err := e.newTable()
	if err != nil {
		return nil, err
	}
	segment, err := e.log.NewSegment(first, bodyBytes)
	if err != nil {
		mem.Free()
		return nil, err
	}
	return &generation{segment: segment, mem: mem, first: first}, nil
}

func (e *Engine) newTable() (*memtable.Table, error) {
	return memtable.New(memtable.Config{Bytes: int(e.memtableBytes), Prefix: []byte{byte(keys.SpaceUser)}, CrowdedAt: crowdedAt})
}

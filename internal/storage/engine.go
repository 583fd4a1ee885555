package storage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// Errors of the engine.
var (
	// ErrMemoryFull means that immutable generations fill the memory budget.
	ErrMemoryFull = errors.New("storage: the memory budget is used up")
	// ErrMergeFirst means that memory is full until generations are merged, which may be for the caller to do. It wraps ErrMemoryFull.
	ErrMergeFirst = fmt.Errorf("%w: generations must be merged first", ErrMemoryFull)
	// ErrNoSegment means that no log segment could be prepared in time. Nothing was written.
	ErrNoSegment = wal.ErrNoSegment
	// ErrReserveUnchecked means that it was not known in time whether the disk has space for a commit. Nothing was written.
	ErrReserveUnchecked = errors.New("storage: the disk reserve is not checked: the device does not answer")
	// ErrFailed means that a write or sync of the log failed, that a commit found no memory after its epoch was reserved, or
	// that an invariant is broken. No write is accepted any more.
	ErrFailed = wal.ErrFailed
)

// Engine is the durable, ordered, versioned map.
type Engine struct {
	// Constant after Open.
	options  Options
	fs       vfs.FS
	lock     io.Closer // of the directory
	registry *pin.Registry
	log      *wal.Log
	pager    *pager.Pager
	blobs    *blob.Store
	pages    *pagesource.Cached
	prefetch *pagesource.Prefetcher // nil in the baseline without prefetch
	pruner   *pruner
	repairs  repairs

	// mu is held while a view is replaced, and guards what a rotation uses. No commit that does not rotate takes it, and
	// no read. Lock order: checkpoints.mu, reserve.mu, memory.retired.mu, mu.
	mu   sync.Mutex
	view atomic.Pointer[view] // written under mu; read without a lock, inside the guard of a slot

	memory      memory
	reserve     diskReserve
	checkpoints checkpointState
	bulkLoads   bulkLoads
	throttling  throttling // delays writers while checkpoints lag
	rebuilds    rebuilds
	counters    counters
}

// repairs are what Open found damaged and made anew, all of it or in part.
type repairs struct {
	made       []string       // constant after Open
	incomplete []string       // made anew in part, because the device failed reads; constant after Open
	unwritten  []func() error // what makes it durable; see writeRepaired
}

// memory is the memory of memtables: its budget, the tables to come, and those that only old readers use.
//
// Invariant: retired.bytes is never negative.
type memory struct {
	resizing       sync.Mutex                // one ResizeCache at a time: the cache has the size that cacheBytes says
	memtableBytes  int64                     // at which a generation is rotated; constant after Open
	cacheBytes     atomic.Int64              // that the page cache may have now; written by Open and ResizeCache
	immutableBytes atomic.Int64              // that immutable memtables may have together; written by Open and ResizeCache
	rotated        atomic.Pointer[time.Time] // time of the last rotation; nil: there was none; written under Engine.mu

	reclaimed atomic.Uint64 // memtables with epochs below this one have been freed; written under retired.mu

	room    chan struct{} // guarded by Engine.mu: closed and replaced when memory has become free
	pool    tablePool     // see there
	retired retired       // see there
}

// checkpointState is what checkpoints keep from one to the next. Bulk loads count as checkpoints.
type checkpointState struct {
	mu contextMutex // one checkpoint at a time; taken before every other lock

	// Safe without mu.
	requests chan struct{}         // capacity 1: there is something to merge; constant after Open
	merging  atomic.Bool           // a merge is running: reading ahead yields to it; written under mu
	blocked  atomic.Pointer[error] // why checkpoints cannot free memory now: the disk is full, or a page is damaged; written under mu
	pins     checkpointPins        // has a lock of its own

	featureLevel  atomic.Uint32 // written by Open and, under mu, by RaiseFeatureLevel
	lastScheduled atomic.Uint64 // the newest epoch when the last checkpoint was scheduled

	// Guarded by mu, but for the atomics in vacuum and fileEnd.
	slot         *pin.Slot
	skippedPages *repairtree.Tree // what merges skip: what the view names, and what was found since
	mapExact     bool             // every live tree page is reachable: of the durable state, so that a checkpoint that fails leaves it as it is
	quarantine   quarantineState
	fileEnd      fileEnd
	vacuum       vacuum
	expired      []byte // the upper bound of the keys that the last checkpoint has dropped as expired
}

// request lets Engine.CheckpointRequests deliver.
func (c *checkpointState) request() {
	select {
	case c.requests <- struct{}{}:
	default:
	}
}

// Open opens or creates the store in o.Dir and recovers what its log holds. When ctx ends first, the replay of a long log stops and Open returns
// why; what the replay has merged into the tree by then is not replayed again by the next start.
func Open(ctx context.Context, o Options, registry *pin.Registry) (*Engine, Recovery, error) {
	o.setDefaults()
	if err := o.FS.MkdirAll(o.Dir); err != nil {
		return nil, Recovery{}, err
	}
	lock, err := o.FS.Lock(o.lockPath())
	if err != nil {
		return nil, Recovery{}, err
	}
	kept, err := o.keepSegmentBytes() // before a file is removed
	if err != nil {
		return nil, Recovery{}, errors.Join(err, lock.Close())
	}
	e := newEngine(&o, registry, lock)
	recovery, err := e.recover(ctx)
	recovery.SegmentBytes = kept
	if err != nil {
		return nil, recovery, errors.Join(err, e.release())
	}
	return e, recovery, nil
}

// newEngine is an engine without files.
func newEngine(o *Options, registry *pin.Registry, lock io.Closer) *Engine {
	e := &Engine{
		options: *o, fs: o.FS, registry: registry, lock: lock, pruner: newPruner(),
		memory: memory{
			memtableBytes: o.MemtableBytes, room: make(chan struct{}),
			pool: tablePool{requested: make(chan struct{}, 1), slot: registry.Slot()},
		},
		checkpoints: checkpointState{mu: newContextMutex(), requests: make(chan struct{}, 1), slot: registry.Slot()},
	}
	e.rebuilds.requests = make(chan struct{}, 1)
	e.reserve.init(o.DiskReserve != 0)
	return e
}

// Close makes every commit durable and closes the files. No reader or writer may be inside.
func (e *Engine) Close() error {
	return errors.Join(e.log.Close(), e.release())
}

// release frees memory and the lock file.
func (e *Engine) release() (err error) {
	if v := e.view.Load(); v != nil {
		e.freed(v.active.mem.Free())
		for _, g := range v.immutables {
			e.freed(g.mem.Free())
		}
	}
	e.memory.retired.free(e)
	e.freeQuarantine(e.checkpoints.quarantine.now)
	e.memory.pool.free(e)
	if e.pager != nil {
		err = e.pager.Close()
	}
	if e.pages != nil {
		err = errors.Join(err, e.pages.Close())
	}
	return errors.Join(err, e.lock.Close())
}

// Err is nil, or why the engine takes no more writes. It wraps ErrFailed.
func (e *Engine) Err() error {
	if err := e.log.Err(); err != nil {
		return err
	}
	if err := e.pager.Err(); err != nil {
		return fmt.Errorf("%w: %w", ErrFailed, err)
	}
	return nil
}

// Durable is the newest epoch on stable storage.
func (e *Engine) Durable() keys.Epoch { return e.log.Durable() }

// WaitDurable returns when every commit through epoch is on stable storage.
func (e *Engine) WaitDurable(ctx context.Context, epoch keys.Epoch) error {
	return e.log.WaitDurable(ctx, epoch)
}

// ObserveDurable is WaitDurable without a request for a sync.
func (e *Engine) ObserveDurable(ctx context.Context, epoch keys.Epoch) error {
	return e.log.ObserveDurable(ctx, epoch)
}

// RequestDurable asks for epoch to become durable soon, and does not wait.
func (e *Engine) RequestDurable(epoch keys.Epoch) { e.log.RequestFlush(epoch) }

// AdvanceGeneration replaces the full generation that w has found, or waits until another writer has replaced it. For a
// record of more than half a segment it makes a new generation at once, reserves in it before other writers see it, and
// returns true: otherwise small records would fill each new segment first. If memory is full, it waits for a checkpoint,
// up to Options.StallMax; it waits as long for a log segment. Errors: ErrMemoryFull, ErrNoSegment, vfs.ErrNoSpace,
// ErrFailed, and the cause of the context's end. After an error the next call retries. ErrRotating means that nothing was reserved, because the tree
// has commits after the epoch validated, which a validation of the record would have to look for in pages.
func (e *Engine) AdvanceGeneration(ctx context.Context, w *Writer, body *batch.Body, validated keys.Epoch) (reserved bool, err error) {
	if !e.oversized(body.Size()) {
		return false, e.awaitRoom(ctx, func() (obstacle, error) { return e.advanceGeneration(w.generation, body.Size(), nil) })
	}
	first := &opening{validated: validated, frees: body.OnlyDeletes(), secure: func(mem *memtable.Table) error { return e.secure(mem, w, body) }}
	first.reserve = func(next *generation) error {
		err := next.reserve(w, body)
		reserved = err == nil
		return err
	}
	defer func() { w.covered = false }()
	for deadline := time.Now().Add(e.options.StallMax); ; {
		first.covered = w.covered && !first.frees // the writer may have it from a record that was refused
		err = e.awaitRoom(ctx, func() (obstacle, error) { return e.advanceGeneration(w.generation, body.Size(), first) })
		if err != errUncovered { //nolint:errorlint // made here
			return reserved, err
		}
		if err = e.AwaitReserve(ctx, w, body); err != nil {
			return false, err
		}
		if short := e.Shortage(); short != nil {
			return false, short
		}
		if time.Now().After(deadline) {
			return false, ErrReserveUnchecked
		}
	}
}

// errUncovered means that others have taken the pages that AwaitReserve found.
var errUncovered = errors.New("storage: the pages for a record are taken")

// opening is what a large record does in a generation before other writers see it.
type opening struct {
	validated keys.Epoch                  // see AdvanceGeneration
	covered   bool                        // see Writer
	frees     bool                        // see wal.Log.Prepare
	secure    func(*memtable.Table) error // an error changes nothing
	reserve   func(*generation) error
}

// oversized reports whether a record with a body of so many bytes takes more than half of a segment.
func (e *Engine) oversized(bytes int) bool { return int64(bytes) > e.options.SegmentBytes/2 }

// advanceGeneration makes one attempt, or returns what the attempt has to wait for; it waits for no device. With first it
// replaces the active generation even if that is not full, and lets first use the new one before other writers see it.
func (e *Engine) advanceGeneration(full *generation, bodyBytes int, first *opening) (obstacle, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.view.Load()
	if first == nil && (v.active != full || !full.sealed()) {
		return obstacle{}, nil // another writer has replaced it, or is between crossing the end and storing it
	}
	if o, err := e.memoryObstacleLocked(v); o.ready != nil || err != nil {
		return o, err
	}
	if first != nil && v.inTree > first.validated {
		return obstacle{}, ErrRotating
	}
	if first != nil && first.covered && !e.covers(e.unmerged()+int64(bodyBytes)) {
		return obstacle{}, errUncovered
	}
	full = v.active
	frees := first != nil && first.frees
	attempt := e.log.Prepare(bodyBytes, frees)
	if attempt == nil { // otherwise others go on in the active generation: a large record may be refused
		full.seal()
		attempt = e.log.Prepare(bodyBytes, frees) // the next epoch is known now
	}
	if attempt != nil {
		return obstacle{attempt.Done(), attempt, e.log.Oversized(bodyBytes)}, nil
	}
	next, err := e.newGenerationLocked(keys.Epoch(full.end.Load()), bodyBytes, first)
	if err != nil {
		return obstacle{}, fmt.Errorf("rotate at epoch %d: %w", full.end.Load(), err)
	}
	var refused error
	if first != nil {
		refused = first.reserve(next)
	}
	frozen := append([]*generation{full}, v.immutables...)
	full.next.Store(next)
	e.setViewLocked(&view{active: next, immutables: frozen, root: v.root, repairTree: v.repairTree, quarantine: v.quarantine, checkpoint: v.checkpoint, inTree: v.inTree})
	e.counters.rotations.Add(1)
	now := time.Now()
	e.updateThrottleLocked(now)
	e.memory.rotated.Store(&now)
	e.reserveFor(e.immutableBytesOf(e.view.Load()))
	e.requestIfDue()
	return obstacle{}, refused
}

// signalRoom updates the delay of writers, and lets writers that wait for memory try again.
func (e *Engine) signalRoom() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.updateThrottleLocked(time.Now())
	close(e.memory.room)
	e.memory.room = make(chan struct{})
}

// SealedEpoch is the last epoch of the newest immutable generation, or of the tree.
func (e *Engine) SealedEpoch() keys.Epoch {
	if frozen := e.view.Load().immutables; len(frozen) > 0 {
		return keys.Epoch(frozen[0].end.Load() - 1)
	}
	return e.pager.State().Epoch
}

// Rotate seals the active generation if it holds anything, so that a checkpoint can take it. Writers go on in it until the log has a segment for
// the next one. If the disk has no room for it, the error is vfs.ErrNoSpace, and if memory is full, ErrMergeFirst. A merge would help, but the caller may
// be the one that merges.
func (e *Engine) Rotate(ctx context.Context) error {
	v := e.view.Load()
	if !v.active.sealed() && v.active.mem.Versions() == 0 {
		return nil
	}
	if e.AwaitsMerge() {
		return ErrMergeFirst
	}
	if err := e.awaitSegment(ctx); err != nil {
		return err
	}
	return e.awaitRoom(ctx, func() (obstacle, error) {
		if e.view.Load().active != v.active {
			return obstacle{}, nil
		}
		if e.AwaitsMerge() { // writers have filled it meanwhile
			return obstacle{}, ErrMergeFirst
		}
		v.active.seal()
		return e.advanceGeneration(v.active, 0, nil)
	})
}

// awaitSegment waits until the log has a segment for the next generation.
func (e *Engine) awaitSegment(ctx context.Context) error {
	deadline := time.After(e.options.StallMax)
	for {
		e.mu.Lock()
		attempt := e.log.Prepare(0, false)
		e.mu.Unlock()
		if attempt == nil {
			return nil
		}
		o := obstacle{attempt.Done(), attempt, false}
		select {
		case <-o.ready:
		case <-deadline:
			return o.timedOut(e)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := o.final(); err != nil {
			return err
		}
	}
}

// immutableBytesOf is the memory of immutable and retired memtables and of the active one, which will be immutable next.
func (e *Engine) immutableBytesOf(v *view) int64 {
	return int64(v.active.mem.Resident()) + residentBytes(v.immutables) + e.memory.retired.bytes.Load()
}

func (e *Engine) newGenerationLocked(first keys.Epoch, bodyBytes int, opening *opening) (*generation, error) {
	mem, err := e.newTable()
	if err != nil {
		return nil, e.noMemory(err)
	}
	if opening != nil {
		if err := opening.secure(mem); err != nil {
			e.freed(mem.Free())
			return nil, err
		}
	}
	segment, err := e.newSegment(first, bodyBytes) // it waits at Open only; see advance
	if err != nil {
		e.freed(mem.Free())
		return nil, err
	}
	return &generation{segment: segment, mem: mem, first: first}, nil
}

// freed counts a failure to unmap memory. It cannot fail for a mapping of this process; if it did, memory would leak.
func (e *Engine) freed(err error) {
	if err != nil {
		e.counters.leaks.Add(1)
	}
}

// StoreID is the random identity that the data file was given when it was created.
func (e *Engine) StoreID() [16]byte { return e.pager.StoreID() }

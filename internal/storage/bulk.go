package storage

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/extsort"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
	"github.com/epochkv/epochkv/internal/storage/throttle"
	"github.com/epochkv/epochkv/internal/vfs"
)

// A bulk load is merged into the tree in one checkpoint, at one epoch E, without log and memtable. The next state is built
// while readers and writers use the present one. Commits pause only while the states are exchanged (ADR 0027).
//
//  1. Add: entries are sorted into a run, in temporary files (extsort).
//  2. BuildBulkLoad: E is chosen far ahead of every commit to come. The run and the immutable generations are merged into a
//     state that no reader sees. E is not reserved: it is a number in the versions of that state.
//  3. CatchUpBulkLoad, several times: the generations that became immutable meanwhile are merged into the same state, at
//     their own epochs, below E. Each round has less to do than the one before. After each merge, of 2 too, its part of the
//     commit is prepared: pages are synced, and space and indirection table know them (ADR 0045).
//  4. BeginBulkLoadSwitch: the caller begins the commit pause. Commits between check and install are completed.
//     SealBulkLoad: the active generation ends, at an epoch L < E.
//  5. FinishBulkLoad: the versions that are left in memory, some milliseconds of work, are merged. The superblock says that every commit
//     up to E is in the tree: the epochs between L and E have no commits. When it is durable the new state is published,
//     with a generation that begins at E+1.
//  6. The caller moves visible from L to E, and ends the commit pause. CompleteBulkLoad retires what only readers of the old
//     state need.
//
// Readers from E on find the bulk load in the tree; older snapshots find versions below E in the same tree. A crash before
// the superblock is durable leaves the old state and its log, to which nothing was added. A crash after it leaves the new
// state, and replay starts after E. A bulk load that fails, or whose context ends, frees its pages and has used no epoch.
//
// While a bulk load is built, the memory of immutable generations does not become free. Writers are delayed as during any
// long merge (throttle). If memory becomes full nevertheless, for instance because the device has become slower, the bulk
// load is cancelled before a writer is refused (YieldingBulkLoad).

// Errors of bulk loads.
var (
	// ErrBulkLoadBusy means that another bulk load is under way.
	ErrBulkLoadBusy = errors.New("storage: another bulk load is under way")
	// ErrBulkLoadQuarantine means that entries are in quarantine: their versions could not be ordered with those of the bulk
	// load. Deleting or overwriting their keys helps.
	ErrBulkLoadQuarantine = errors.New("storage: no bulk load while entries are in quarantine; delete or overwrite their keys")
	// ErrBulkLoadOvertaken means that commits used more epochs during the bulk load than were left before its own.
	ErrBulkLoadOvertaken = errors.New("storage: commits have overtaken the bulk load's epoch")
	// ErrBulkLoadYielded means that commits found no memory, or on a full disk no log segment, before the bulk load ended: it was
	// cancelled, and commits continue. It wraps ErrMemoryFull.
	ErrBulkLoadYielded = fmt.Errorf("%w: the bulk load was cancelled so that commits can continue", ErrMemoryFull)
	// ErrEpochsUsedUp means that so many epochs have been used that the rest is for commits.
	ErrEpochsUsedUp = errors.New("storage: no epochs are left for bulk loads")
)

const (
	// Bounds of the chunks that a bulk load sorts in memory. Larger chunks make fewer runs to merge.
	bulkChunkBytesMax = 32 << 20
	bulkChunkBytesMin = 1 << 20
	// bulkLoadEpochsAhead and bulkLoadEpochsPerKey are how far the epoch of a bulk load is ahead: more than can be committed
	// meanwhile. 2^28 bulk loads use up the 2^56 epochs.
	bulkLoadEpochsAhead  = 1 << 28
	bulkLoadEpochsPerKey = 64
	// bulkLoadVersionUnknown is how long the merge of a version is expected to take before one was measured.
	bulkLoadVersionUnknown = 2 * time.Millisecond
	// bulkLoadEpochMax leaves half of all epochs to commits.
	bulkLoadEpochMax = keys.MaxEpoch / 2
)

// BulkLoad is a running bulk load. It is for one goroutine.
type BulkLoad struct {
	engine *Engine
	sorter *extsort.Sorter
	closed bool
	bytes  uint64 // keys and values that were added
	bounds keys.LoadedRange

	run     *extsort.Run // all entries, once prepared
	epoch   keys.Epoch
	after   keys.Epoch     // the newest commit before it, once published
	time    uint64         // of its commit, once published; microseconds since 1970
	build   *bulkLoadBuild // from BuildBulkLoad until CompleteBulkLoad or CancelBulkLoad
	durable bool
}

// bulkLoadBuild is the state that is built for a bulk load.
type bulkLoadBuild struct {
	watermarks   GCWatermarks
	commitTime   uint64 // of the bulk load
	ck           *pager.Checkpoint
	batch        *blob.Batch
	sink         *pager.Sink
	root         btree.Root
	skippedPages *repairtree.Tree
	copies       map[page.Ref]page.Ref // of blobs that go into the repair tree: for each, the copy for its mirror
	mapExact     bool                  // of this state
	freed        []page.ID
	stats        btree.Stats
	taken        int           // how many of the immutable generations, the oldest ones, are in it
	merged       []*generation // all generations that are in it, once published
	bytes        int64         // of their tables
	began        time.Time
	last         catchUpRound
}

// catchUpRound is what the last round of CatchUpBulkLoad merged, and how long that took without the sync.
type catchUpRound struct {
	versions int
	bytes    int64 // as the throttle counts them
	merge    time.Duration
}

// newCatchUpRound counts entry by entry: memtables get their memory in large pieces.
func newCatchUpRound(generations []*generation) (round catchUpRound) {
	in, entry := newMemInput(generations), btree.Entry{}
	for in.Next(&entry) {
		round.versions++
		round.bytes += int64(nodeBytes + len(entry.Key) + len(entry.Value))
	}
	return round
}

// bulkLoads is the engine's part of bulk loads.
type bulkLoads struct {
	open     atomic.Bool // there is one
	finished atomic.Uint64
	keys     atomic.Uint64
	bytes    atomic.Uint64
	loaded   loadedRanges
	yield    yielder // cancels the bulk load that is being built

	// Guarded by Engine.mu.
	switching bool // commits pause: the running ones need not wait for memory, which only the bulk load can free
	sealed    bool // the active generation is the last one before the bulk load, until that is published or cancelled
}

// NewBulkLoad begins a bulk load. It ends with Close. Errors: ErrBulkLoadBusy while there is another one, and
// ErrBulkLoadQuarantine while entries are in quarantine.
func (e *Engine) NewBulkLoad() (*BulkLoad, error) {
	if e.view.Load().quarantine != nil {
		return nil, ErrBulkLoadQuarantine
	}
	if !e.bulkLoads.open.CompareAndSwap(false, true) {
		return nil, ErrBulkLoadBusy
	}
	chunk := int(min(max(e.options.MemoryBytes/32, bulkChunkBytesMin), bulkChunkBytesMax)) // two of them take a sixteenth
	sorter := extsort.New(extsort.Options{
		FS: e.fs, FileName: e.options.sortFilePath, ChunkBytes: chunk, InlineMax: page.InlineMax(e.pager.PageSize()),
	})
	return &BulkLoad{engine: e, sorter: sorter}, nil
}

// Add takes an entry; key is an internal key. It keeps neither slice. Of several entries with one key the last one counts.
func (l *BulkLoad) Add(key, value []byte) error {
	if n := len(key); n == 0 || n > page.KeySizeMax(l.engine.pager.PageSize()) || len(value) > blob.ValueMax {
		return fmt.Errorf("storage: bulk load: key of %d and value of %d bytes", n, len(value))
	}
	l.bytes += uint64(len(key) + len(value))
	l.bounds.Add(key)
	return l.sorter.Add(key, value)
}

// Cancel lets an Add that waits for the sorting of earlier entries end early, with an error. It may be called by any goroutine.
func (l *BulkLoad) Cancel() { l.sorter.Cancel() }

// Prepare ends the intake and sorts. It returns the number of keys.
func (l *BulkLoad) Prepare(ctx context.Context) (uint64, error) {
	r, err := l.sorter.Finish(ctx)
	if err != nil || r == nil {
		return 0, err
	}
	l.run = r
	return r.Count, nil
}

// Close ends the bulk load, finished or not, and removes its temporary files.
func (l *BulkLoad) Close() error {
	if l.closed {
		return nil
	}
	l.closed = true
	err := l.sorter.Close()
	l.engine.bulkLoads.open.Store(false)
	if errors.Is(err, vfs.ErrCrashed) {
		return nil
	}
	return err
}

// Published reports whether the bulk load is durable and can be read.
func (l *BulkLoad) Published() bool { return l.durable }

// Epoch is the epoch of the bulk load, from BuildBulkLoad on.
func (l *BulkLoad) Epoch() keys.Epoch { return l.epoch }

// After is the newest commit before the bulk load, once it is published: no epoch between the two names a commit.
func (l *BulkLoad) After() keys.Epoch { return l.after }

// CommitTime is when the bulk load was committed, in microseconds since 1970, once it is published.
func (l *BulkLoad) CommitTime() uint64 { return l.time }

// YieldingBulkLoad returns a context for a bulk load, which prevents checkpoints. It ends, with ErrBulkLoadYielded, when a writer has waited for memory
// for half of Options.StallMax, or when one waits on a full disk for a log segment that only a checkpoint gives back. Such a writer keeps its latches,
// and the commit of the bulk load would wait for them.
func (e *Engine) YieldingBulkLoad(ctx context.Context) (yielding context.Context, release func()) {
	return e.bulkLoads.yield.begin(ctx)
}

// yielder cancels work that keeps memory from becoming free.
type yielder struct {
	cancel atomic.Pointer[context.CancelCauseFunc] // nil without such work
}

// begin returns a context for the work.
func (y *yielder) begin(ctx context.Context) (yielding context.Context, release func()) {
	yielding, cancel := context.WithCancelCause(ctx)
	y.cancel.Store(&cancel)
	return yielding, func() {
		y.cancel.Store(nil)
		cancel(nil)
	}
}

func (y *yielder) yield(cause error) {
	if cancel := y.cancel.Load(); cancel != nil {
		(*cancel)(cause)
	}
}

// yieldToCommits cancels the bulk load that is being built, and what a merge rebuilds.
func (e *Engine) yieldToCommits() {
	e.bulkLoads.yield.yield(ErrBulkLoadYielded)
	e.rebuilds.yield.yield(errRebuildYields)
}

// BuildBulkLoad merges the bulk load into a state that no reader sees, at an epoch far ahead of visible. Unless it returns an
// error, CompleteBulkLoad or CancelBulkLoad must follow, and until then no checkpoint is made.
func (e *Engine) BuildBulkLoad(ctx context.Context, l *BulkLoad, h GCWatermarks) error {
	epoch := h.Visible + bulkLoadEpochsAhead + bulkLoadEpochsPerKey*keys.Epoch(l.run.Count)
	if epoch > bulkLoadEpochMax {
		return ErrEpochsUsedUp
	}
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return err
	}
	if e.checkpoints.quarantine.now != nil {
		e.checkpoints.mu.Unlock()
		return ErrBulkLoadQuarantine
	}
	e.Reclaim()
	e.checkpoints.merging.Store(true)
	frozen := e.complete(h.Visible)
	l.epoch = epoch
	l.build = &bulkLoadBuild{
		watermarks: h, root: e.view.Load().root, skippedPages: e.checkpoints.skippedPages, copies: map[page.Ref]page.Ref{},
		mapExact: e.checkpoints.mapExact, began: time.Now(),
	}
	e.throttleBegin(&mergeJob{immutables: frozen, entries: l.run.Count + bulkStoreWork(l.run)})
	err := e.buildBulkLoad(ctx, l, frozen)
	if err != nil {
		e.CancelBulkLoad(l)
		return fmt.Errorf("bulk load: %w", e.damage(err, e.view.Load().root, nil))
	}
	return nil
}

func (e *Engine) buildBulkLoad(ctx context.Context, l *BulkLoad, frozen []*generation) (err error) {
	b := l.build
	if b.ck, err = e.pager.Begin(); err != nil {
		return err
	}
	b.batch, b.sink = e.blobs.Begin(b.ck), b.ck.Sink()
	endSyncs := e.syncWhile(ctx, b.ck)
	err = e.mergeBulkLoad(ctx, l, frozen)
	if err = cmp.Or(err, endSyncs()); err != nil {
		return err
	}
	b.taken = len(frozen)
	return e.prepareBulkLoad(ctx, b)
}

// mergeBulkLoad stores the large values of the run, and merges the run and the immutable generations.
func (e *Engine) mergeBulkLoad(ctx context.Context, l *BulkLoad, frozen []*generation) error {
	b := l.build
	stored, err := l.sorter.ReplaceLarge(ctx, func(dst, key, value []byte) ([]byte, error) {
		ref, err := b.batch.Store(value)
		if err == nil && b.skippedPages.Mirrors(key, l.epoch) {
			b.copies[ref], err = b.batch.Store(value)
		}
		if err == nil {
			err = b.batch.Relieve()
		}
		e.throttleProgress(1 + len(value)/1024)
		return append(dst, ref[:]...), err
	})
	if err != nil {
		return err
	}
	in := e.mergeInput(b.ck, b.batch, b.sink, b.root, frozen, b.watermarks.policy(l.epoch))
	in.Input = func() btree.Input { return newBulkInput(stored, l.epoch, newMemInput(frozen)) }
	in.Lookahead = nil // its seeks read files
	cuts, err := stored.Split(bulkCutBlocks, bulkCutBytesMax)
	if err != nil {
		return err
	}
	if in.Cuts.Least > 0 || len(cuts) > len(in.Cuts.Keys) {
		in.Cuts = btree.Cuts{Keys: cuts}
	}
	return e.mergeForBulkLoad(ctx, l, in)
}

// prepareBulkLoad does as much of the commit as can be done before the commit pause, so that the pause has work only for
// what was merged later, however large the bulk load is: the pages are written and synced, the indirection table has the
// blobs, and the allocation map and the file have room.
func (e *Engine) prepareBulkLoad(ctx context.Context, b *bulkLoadBuild) error {
	if err := b.batch.Prepare(ctx); err != nil {
		return err
	}
	if err := b.ck.Prepare(); err != nil {
		return err
	}
	if err := b.ck.KeepFree(e.floorBytes()); err != nil {
		return err
	}
	return b.ck.Sync(ctx)
}

// mergeForBulkLoad merges into the state of the bulk load.
func (e *Engine) mergeForBulkLoad(ctx context.Context, l *BulkLoad, in *btree.MergeInput) error {
	b := l.build
	in.Workers = btree.Always(max(e.mergeWorkers(), runtime.GOMAXPROCS(0)))
	result, known, err := mergeBoth(ctx, in, b.skippedPages, b.copies, l.epoch)
	if err != nil {
		if !inBulkLoadPages(b.ck, err) {
			_ = e.skipPages(err) || e.skipInRepairTree(err) // another attempt skips the page
		}
		return err
	}
	complete, err := b.skippedPages.FreeUnused(ctx, &e.pager.Reader, b.ck, repairtree.Blobs{Drop: b.batch, Store: e.blobs})
	if err != nil {
		return err
	}
	b.ck.Free(result.Freed...)
	b.mapExact = b.mapExact && complete
	b.root, b.skippedPages, b.freed = result.Root, known, append(b.freed, result.Freed...)
	b.stats.Add(&result.Stats)
	return b.sink.Flush() // the next merge reads it
}

// inBulkLoadPages reports whether a merge found damage in pages that an earlier round wrote. They are freed with the bulk
// load: no tree in use has them.
func inBulkLoadPages(ck *pager.Checkpoint, err error) bool {
	found, ok := errors.AsType[*btree.UnreadableError](err)
	return ok && slices.ContainsFunc(found.Pages, func(p btree.UnreadablePage) bool { return ck.IsTaken(p.ID) })
}

// RotateForBulkLoad makes the active generation immutable. It reports false if there is no memory for another generation.
func (e *Engine) RotateForBulkLoad(ctx context.Context) (bool, error) {
	v := e.view.Load()
	if !v.active.sealed() && v.active.mem.Versions() == 0 {
		return true, nil
	}
	v.active.seal()
	deadline := time.After(e.options.StallMax)
	for {
		o, err := e.advanceGeneration(v.active, 0, nil)
		if err != nil || o.segment == nil {
			return o.ready == nil, err
		}
		select {
		case <-o.ready:
		case <-deadline:
			return false, o.timedOut(e)
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
		if err := o.final(); err != nil {
			return false, err
		}
	}
}

// CatchUpBulkLoad merges the generations that became immutable meanwhile, all of whose epochs are installed, and makes the
// pages of the bulk load durable.
func (e *Engine) CatchUpBulkLoad(ctx context.Context, l *BulkLoad, h GCWatermarks) error {
	b := l.build
	b.watermarks = h // dead versions are dropped, so that a key that is written all the time does not fill the tree
	frozen := e.complete(h.Visible)
	fresh := frozen[:len(frozen)-b.taken]
	if len(fresh) == 0 {
		return nil
	}
	round, began := newCatchUpRound(fresh), time.Now()
	in := e.mergeInput(b.ck, b.batch, b.sink, b.root, fresh, b.watermarks.policy(l.epoch))
	if err := e.mergeForBulkLoad(ctx, l, in); err != nil {
		return fmt.Errorf("bulk load: %w", e.damage(err, e.view.Load().root, nil))
	}
	if round.merge = time.Since(began); round.versions > 0 {
		b.last = round
	}
	b.taken = len(frozen)
	if err := e.prepareBulkLoad(ctx, b); err != nil {
		return fmt.Errorf("bulk load: %w", e.damage(err, e.view.Load().root, nil))
	}
	return nil
}

// ThrottleForBulkLoad delays writers until the bulk load ends: what they write is no more than 1/factor of what the last
// round of CatchUpBulkLoad merged in the same time.
func (e *Engine) ThrottleForBulkLoad(l *BulkLoad, factor int) {
	round := l.build.last
	perKiB := float64(round.merge) * float64(factor) / max(float64(round.bytes)/1024, 1)
	e.throttleAtLeast(time.Duration(min(perKiB, float64(throttle.FloorMax))))
}

// BulkLoadLag is how long CatchUpBulkLoad or FinishBulkLoad has to merge what is left, at the rate of the last round. Before
// the first round each version counts as the read of a page and more.
func (e *Engine) BulkLoadLag(l *BulkLoad) time.Duration {
	perVersion := float64(bulkLoadVersionUnknown)
	if last := l.build.last; last.versions > 0 {
		perVersion = float64(last.merge) / float64(last.versions)
	}
	return time.Duration(perVersion * float64(e.bulkLoadVersionsLeft(l)))
}

// bulkLoadVersionsLeft is how many versions CatchUpBulkLoad or FinishBulkLoad still has to merge.
func (e *Engine) bulkLoadVersionsLeft(l *BulkLoad) (versions int) {
	v := e.view.Load()
	for _, g := range v.immutables[:len(v.immutables)-l.build.taken] {
		versions += g.mem.Versions()
	}
	return versions + v.active.mem.Versions()
}

// bulkCutBlocks is the distance of the keys at which the merge of a bulk load is cut for its workers:
// about thirty leaves of work. In large loads it is more, so that the keys take at most bulkCutBytesMax.
const (
	bulkCutBlocks   = 4
	bulkCutBytesMax = 1 << 20
)

// bulkStoreWork is the number of versions that could be merged in about the time that it takes to store
// the large values of a run: one for each, and one for each KiB.
func bulkStoreWork(r *extsort.Run) uint64 { return r.Large + r.LargeKiB }

package storage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/wal"
)

// recover replays the log after the epoch of the tree into memtables (see replayer), and opens a
// new segment after it.
func (e *Engine) recover(ctx context.Context) (Recovery, error) {
	if err := errors.Join(removeSortFiles(e.fs, e.options.Dir), e.openTree(ctx)); err != nil {
		return Recovery{}, err
	}
	state := e.pager.State()
	e.useFeatureLevel()
	if err := e.checkNewest(ctx, &state); err != nil {
		return Recovery{}, err
	}
	r := replayer{ctx: ctx, engine: e, root: rootOf(state), after: state.Epoch, commitTime: commitTime(&state), lastReported: time.Now()}
	found, err := wal.Recover(e.fs, e.options.Dir, state.Epoch, logProof(&state), r.apply)
	if err != nil {
		return Recovery{}, errors.Join(blameSuperblock(&e.pager.Reader, err), r.free())
	}
	if err := e.writeRepaired(); err != nil {
		return Recovery{}, errors.Join(TranslateError(err), r.free())
	}
	recovery := Recovery{Repaired: e.repairs.made, Incomplete: e.repairs.incomplete, Records: found.Records, Bytes: found.Bytes, Epoch: found.Last, Next: found.Next(), CommitTime: r.commitTime, Skipped: skipped(&found), Tree: state.Epoch, TreeTime: commitTime(&state)}
	if torn := found.Torn; torn != nil {
		recovery.TornFile, recovery.TornAt, recovery.TornSize = torn.File, torn.Offset, torn.Bytes
	}
	e.log, err = wal.Open(wal.Options{
		FS: e.fs, Dir: e.options.Dir, SegmentBytes: int(e.options.SegmentBytes), Buffers: e.options.logBuffers(),
		Reserve: e.options.logReserve(), Lineage: lineageOf(&state),
	}, found)
	if err != nil {
		return recovery, errors.Join(err, r.free())
	}
	e.holdChangeLog()
	e.bulkLoads.loaded.open(found.Last)
	r.seal(found.Last + 1)
	if err := r.complete(); err != nil {
		return recovery, errors.Join(err, e.log.Close(), r.free())
	}
	recovery.Checkpoints, recovery.MemtablePeak = r.merges, r.peak
	if err := e.beginLog(&found); err != nil {
		return recovery, errors.Join(err, e.log.Close(), r.free())
	}
	active, err := e.firstGeneration(&found, len(r.filled) == 0)
	if err == nil {
		err = e.recordLost(active, &found)
	}
	if err != nil {
		return recovery, errors.Join(err, e.log.Close(), r.free())
	}
	if err := e.recordLogSegment(); err != nil {
		return recovery, errors.Join(err, e.log.Close(), r.free())
	}
	v := &view{active: active, root: r.root, repairTree: e.checkpoints.skippedPages, quarantine: e.checkpoints.quarantine.now, checkpoint: e.pager.Checkpoint(), inTree: e.pager.State().Epoch}
	for i := len(r.filled) - 1; i >= 0; i-- {
		v.immutables = append(v.immutables, r.filled[i])
	}
	e.mu.Lock()
	e.setViewLocked(v)
	e.mu.Unlock()
	e.openReserve()
	if len(v.immutables) > 0 || e.checkpoints.skippedPages.Abandoned() {
		e.checkpoints.request()
	}
	return recovery, nil
}

// skipped are the epochs of which commits may have been seen that do not exist any more.
func skipped(found *wal.Recovery) []keys.EpochRange {
	if next := found.Next(); next > found.Last+1 {
		return append(found.Skipped, keys.EpochRange{First: found.Last + 1, Last: next - 1})
	}
	return found.Skipped
}

// recordLogSegment records in the data file of a new store that a log exists, so that from the
// first commit on a removed log is noticed. Later checkpoints record it as well.
func (e *Engine) recordLogSegment() error {
	state := e.pager.State()
	if logProof(&state).Segment != 0 || e.log.NewestDurableHeader() == 0 {
		return nil
	}
	setLogSegment(&state, e.log.NewestDurableHeader())
	return e.writeState(state)
}

// openTree opens the data file, or creates it.
func (e *Engine) openTree(ctx context.Context) error {
	e.pages = new(pagesource.Cached)
	patience := patience{ctx: ctx, left: e.options.StartPatience, first: e.options.StartPatience / firstPauseShare}
	p, err := openOrCreate(&e.options, pager.Options{PageSize: e.options.PageSize, OnFree: e.pages.Invalidate, OnAbort: e.pages.Revoke, RebuildMap: true, ReadAgain: patience.again})
	if err != nil {
		return TranslateError(err)
	}
	e.pager = p
	defer p.ReadAgain(nil)
	state := p.State()
	if err := checkFeatureLevel(&state); err != nil {
		return TranslateError(err)
	}
	if err := e.pages.Open(&p.Reader, e.options.CacheBytes, e.registry); err != nil {
		return err
	}
	e.memory.cacheBytes.Store(e.options.CacheBytes)
	e.memory.immutableBytes.Store(e.options.immutableBytes())
	if !e.options.Ablation.NoPrefetch() {
		e.prefetch = pagesource.NewPrefetcher(e.pages, engineState{e}, e.registry)
	}
	return TranslateError(e.openTables())
}

// checkNewest refuses to start if a newer superblock than the opened one may be unreadable, and the log does not reach back to the opened one. It reads the
// whole log for that. Nothing may be written before: the next checkpoint takes the place of the newer superblock, which the next start may be
// able to read, and a replay merges before it has come to the end of the log.
func (e *Engine) checkNewest(ctx context.Context, state *pager.State) error {
	if !e.pager.SuperblockMissing() {
		return nil
	}
	_, err := wal.Replay(e.fs, e.options.Dir, state.Epoch, logProof(state), func(keys.Epoch, []byte) error { return context.Cause(ctx) })
	if err == nil {
		return nil
	}
	return blameSuperblock(&e.pager.Reader, err)
}

// openTables opens the structures next to the tree in the data file, and repairs in memory what can be
// repaired: see writeRepaired.
func (e *Engine) openTables() (err error) {
	for _, fault := range e.pager.SuperblockFaults() {
		if e.pager.SuperblocksRepaired() > 0 {
			e.repairs.made = append(e.repairs.made, fmt.Sprintf("a superblock was written anew from its copy: %v", fault))
		}
	}
	tables, state := len(e.repairs.made), e.pager.State()
	e.checkpoints.mapExact = mapIsExact(&state) || e.pager.Checkpoint() == newFileCheckpoint
	if e.blobs, err = e.openBlobs(); err != nil {
		return err
	}
	if err := e.rebuildMap(); err != nil {
		return err
	}
	if e.checkpoints.skippedPages, err = readRepairTree(&e.pager.Reader, e.blobs); err != nil {
		return err
	}
	if err := e.openQuarantine(); err != nil {
		return err
	}
	e.rebuilds.requestFor(e.checkpoints.skippedPages)
	if len(e.repairs.made) > tables && len(e.repairs.incomplete) == 0 {
		e.repairs.unwritten = append(e.repairs.unwritten, func() error { return e.writeState(e.pager.State()) })
	}
	return nil
}

func rootOf(s pager.State) btree.Root {
	if s.Root == 0 {
		return btree.Root{}
	}
	return btree.Root{ID: s.Root, Level: int(s.Height) - 1}
}

// TranslateError turns errors of the log and of the pager into the engine's.
func TranslateError(err error) error {
	if damage, ok := errors.AsType[*wal.CorruptionError](err); ok {
		return &CorruptionError{File: damage.File, Offset: damage.Offset, Reason: damage.Reason, Remedy: damage.Remedy}
	}
	if foreign, ok := errors.AsType[*wal.LineageError](err); ok {
		return &CorruptionError{File: foreign.File, Reason: foreign.Reason(), Remedy: foreign.Remedy()}
	}
	if errors.Is(err, pager.ErrSuperblockUnreadable) {
		return fmt.Errorf("%w; start again when the device reads it; if it never will, %s", err, fileRemedy)
	}
	for _, whole := range []error{pager.ErrTruncated, pager.ErrNotDataFile, pager.ErrSuperblocks, pager.ErrSuperblockMissing} {
		if errors.Is(err, whole) {
			return &CorruptionError{File: dataName, Reason: err.Error(), Remedy: fileRemedy}
		}
	}
	if damage, ok := errors.AsType[*pager.CorruptError](err); ok {
		return &CorruptionError{File: damage.File, Offset: damage.Offset, Reason: damage.Reason, Remedy: pageRemedy}
	}
	if errors.Is(err, wal.ErrVersion) || errors.Is(err, pager.ErrNewerFormat) {
		return fmt.Errorf("%w: %w", ErrNewerFormat, err)
	}
	return err
}

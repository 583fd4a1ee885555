package storage

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
	"github.com/epochkv/epochkv/internal/vfs"
)

// relocatePagesMin is how many pages near the end of the file a checkpoint moves down: half a megabyte of default pages, so that
// the file shrinks at a small cost. In a large file it is the part 1/relocateShare, so that some thirty checkpoints suffice.
const (
	relocatePagesMin = 64
	relocateShare    = 32
)

// smallTreePages is the tree size below which its own separators divide every merge too coarsely.
const smallTreePages = 256

// KeyRange is a range of internal keys.
type KeyRange = btree.Range

// GCWatermarks say which versions readers still need. The caller passes them down as values.
type GCWatermarks struct {
	Visible   keys.Epoch   // every commit up to it is installed
	Snapshots []keys.Epoch // ascending: live snapshots, then the least epoch that a new snapshot can get
	System    []keys.Epoch // the same for keys in keys.SpaceSystem; nil if Snapshots is for all keys
	Expired   []Expired    // ascending; a range that is later has what is in those before it
}

// Expired are internal keys that no reader asks for any more, as a commit says. States from that commit on need not have them. Earlier ones must: the
// log after a state may be lost, and the commit with it.
type Expired struct {
	KeyRange
	Since keys.Epoch // that of the commit
}

// expired are the keys that a state need not have.
func (h *GCWatermarks) expired(state keys.Epoch) (newest KeyRange) {
	for _, e := range h.Expired {
		if e.Since <= state {
			newest = e.KeyRange
		}
	}
	return newest
}

// policy is that of a merge into a state.
func (h *GCWatermarks) policy(state keys.Epoch) btree.Policy {
	return btree.Policy{MinVisible: h.Snapshots[0], Snapshots: h.Snapshots, System: h.System, Expired: h.expired(state)}
}

// Checkpoint merges every complete immutable generation into the tree, vacuums some leaves, and makes the new root durable, in
// this order: log, data pages, sync, superblock, sync, publish, recycle. It does nothing if there is nothing to merge, to
// vacuum, or to relocate. Large merges are divided into several checkpoints, so that memory becomes free between them.
// After a cancelled context, a full disk or a damaged page the last state is in use; any other error is final.
func (e *Engine) Checkpoint(ctx context.Context, h GCWatermarks) error {
	for {
		left, err := e.checkpoint(ctx, &h)
		if left == 0 || err != nil {
			return err
		}
	}
}

// checkpoint makes one checkpoint, and returns how many complete generations it leaves to the next ones.
func (e *Engine) checkpoint(ctx context.Context, h *GCWatermarks) (left int, err error) {
	if err := e.checkpoints.mu.Lock(ctx); err != nil {
		return 0, err
	}
	defer e.checkpoints.mu.Unlock()
	e.Reclaim()
	complete, garbage := e.complete(h.Visible), e.findDeadVersions(ctx, h)
	most, short := e.memory.immutableBytes.Load()/mergeShare, e.Shortage() != nil
	if short {
		most = 0 // one at a time: the next can use the pages that the first frees
	}
	merging := atOnce(complete, most)
	if len(merging) == 0 && garbage.Empty() && !e.shrinkable() && !e.rebuilds.waiting.Load() && !e.checkpoints.skippedPages.Abandoned() {
		e.checkpoints.vacuum.advance(garbage)
		if len(e.view.Load().immutables) == 0 {
			e.checkpoints.blocked.Store(nil) // nothing waits for what the last one could not do
		}
		return 0, nil
	}
	start, job := time.Now(), mergeJob{immutables: merging, deadVersions: garbage, watermarks: *h}
	expired := h.expired(job.cut(e.pager.State().Epoch)).Upper
	drop := !bytes.Equal(e.checkpoints.expired, expired)
	job.dropExpired = drop
	err = e.merge(ctx, job)
	if doesNotFit(err) && len(complete) > 0 && e.reserve.enabled {
		garbage, drop = nil, false
		merging, err = e.mergeInSteps(ctx, complete, h)
	}
	if err != nil {
		err = fmt.Errorf("checkpoint: %w", e.damage(err, btree.Root{}, nil))
		if _, published := errors.AsType[publishedError](err); published {
			e.checkpoints.blocked.Store(nil)
		} else if doesNotFit(err) || errors.Is(err, ErrDamaged) {
			e.checkpoints.blocked.Store(&err)
			e.CheckSpace()
		} else if ctx.Err() != nil {
			e.requestIfDue() // a rotation during this merge may have asked for none
		}
		e.refuseWaiters()
		return 0, err
	}
	e.checkpoints.blocked.Store(nil)
	e.CheckSpace()
	e.signalRoom() // for writers that wait for a segment
	e.checkpoints.vacuum.advance(garbage)
	if drop {
		e.checkpoints.expired = expired
	}
	e.counters.checkpointed(time.Since(start))
	return len(complete) - len(merging), nil
}

// refuseWaiters wakes writers that wait for memory, so that they return the reason why there will be none. After an error
// that can pass it wakes none: each writer that tries again requests a checkpoint, which would fail again at once.
func (e *Engine) refuseWaiters() {
	if e.checkpoints.blocked.Load() != nil || e.Err() != nil {
		e.signalRoom()
	}
}

// mergeShare limits a merge to the part 1/mergeShare of the memory for immutable generations. Their memory becomes free only
// when the merge ends; if one merge took all of them, writers would have no memory until then.
const mergeShare = 2

// atOnce returns the generations that one merge should take: the oldest ones, and at least one.
func atOnce(complete []*generation, most int64) []*generation {
	bytes := int64(0)
	for i := len(complete) - 1; i >= 0; i-- {
		bytes += int64(complete[i].mem.Resident())
		if bytes > most && i < len(complete)-1 {
			return complete[i+1:]
		}
	}
	return complete
}

// complete returns the immutable generations in which every epoch is installed, newest first. They are the oldest ones.
func (e *Engine) complete(visible keys.Epoch) []*generation {
	frozen := e.view.Load().immutables
	for len(frozen) > 0 && frozen[0].end.Load() > uint64(visible)+1 {
		frozen = frozen[1:]
	}
	e.pruner.quiesce()
	return frozen
}

// mergeJob is what one checkpoint merges.
type mergeJob struct {
	immutables   []*generation       // newest first
	entries      uint64              // of a bulk load, in addition
	deadVersions *btree.DeadVersions // to be vacuumed, or nil
	dropExpired  bool                // drop expired keys from all leaves
	watermarks   GCWatermarks

	recovering bool     // during Open: no reader or writer needs the machine
	span       *keySpan // of a step; nil for a whole merge

	quarantine quarantinePlan // of the current attempt
	mapExact   bool           // of the state that the current attempt makes
}

// cut is the epoch up to which the tree has every commit after the merge.
func (j *mergeJob) cut(before keys.Epoch) keys.Epoch {
	if len(j.immutables) > 0 {
		return keys.Epoch(j.immutables[0].end.Load() - 1)
	}
	return before
}

// history is the term and the commit time of the epoch cut, which are those of the state before if the epoch stays.
func (j *mergeJob) history(e *Engine, cut keys.Epoch) (term keys.Term, at uint64) {
	state := e.pager.State()
	if cut == state.Epoch {
		return termOf(&state), commitTime(&state)
	}
	for _, g := range j.immutables {
		at = max(at, g.commitTime.Load())
	}
	if j.recovering {
		return j.immutables[0].term, at
	}
	return e.log.TermOf(cut), at
}

// newest is the newest epoch of which the merge has versions, as far as the log has records of it: an empty
// generation may begin and end after epochs that are skipped.
func (j *mergeJob) newest() keys.Epoch {
	for _, g := range j.immutables {
		if g.mem.Versions() > 0 {
			return keys.Epoch(g.end.Load() - 1)
		}
	}
	return 0
}

func (e *Engine) merge(ctx context.Context, job mergeJob) error {
	e.checkpoints.merging.Store(true)
	defer e.checkpoints.merging.Store(false)
	v := e.view.Load()
	cut := job.cut(e.pager.State().Epoch)
	// What the tree holds must not be ahead of the log: a crash would otherwise leave epochs that recovery cannot number.
	if err := e.log.WaitDurable(ctx, cut); err != nil {
		return err
	}
	e.throttleBegin(&job)
	number, result, err := e.mergeTree(ctx, v.root, &job, cut)
	if err != nil {
		e.throttleFail()
		return err
	}
	e.throttleMeasure()
	e.readDeadVersionRatio(result.Root)
	e.pages.AdmitReplacements(e.checkpoints.slot, result.Freed, result.Root)
	return e.publishAndShrink(number, result.Root, job.immutables, cut)
}

// mergeTree makes a new state durable in the data file, and returns the number of its checkpoint. No reader sees its root
// yet. Pages that cannot be read are skipped, and entries that the tree refuses go into quarantine.
func (e *Engine) mergeTree(ctx context.Context, base btree.Root, job *mergeJob, cut keys.Epoch) (number uint64, result *btree.Result, err error) {
	for {
		attempt, release := e.yieldingRebuild(ctx, job)
		number, result, err = e.tryMerge(attempt, base, job, cut)
		release()
		if errors.Is(err, context.Canceled) && errors.Is(context.Cause(attempt), errRebuildYields) {
			err = errRebuildYields
		}
		gaveUp := e.failsRebuild(job, err) && e.giveUpRebuild(ctx, job, err)
		if !gaveUp && !e.skipPages(err) && !e.skipInRepairTree(err) && !e.setAside(err) && !e.giveUpRebuild(ctx, job, err) {
			return number, result, e.stopIfBroken(err)
		}
		if !job.recovering {
			e.throttleBegin(job) // from the start, with as much to do
		}
	}
}

// skipPages adds pages that a merge could not read to the skipped ones, and reports whether another attempt can succeed.
func (e *Engine) skipPages(err error) bool {
	found, ok := errors.AsType[*btree.UnreadableError](err)
	if !ok {
		return false
	}
	known, changed := e.checkpoints.skippedPages.With(found.Pages, e.pager.Checkpoint()+1)
	if changed {
		e.checkpoints.skippedPages = known
		e.counters.damaged.Add(uint64(len(found.Pages)))
		e.meetsLost(found.Pages)
	}
	return changed
}

// skipInRepairTree gives up the repair tree or its mirror, if a merge needed a damaged page of it, and reports whether the other one is left.
func (e *Engine) skipInRepairTree(err error) bool {
	found, ok := errors.AsType[*repairtree.DamageError](err)
	if !ok {
		return false
	}
	known, ok := e.checkpoints.skippedPages.Without(found.Tree)
	if ok {
		e.checkpoints.skippedPages = known
		e.counters.damaged.Add(1)
	}
	return ok
}

func (e *Engine) tryMerge(ctx context.Context, base btree.Root, job *mergeJob, cut keys.Epoch) (number uint64, result *btree.Result, err error) {
	ck, err := e.pager.Begin()
	if err != nil {
		return 0, nil, err
	}
	endSyncs := e.syncWhile(ctx, ck)
	result, known, err := e.build(ctx, ck, base, job, cut)
	if err = cmp.Or(err, endSyncs()); err != nil {
		ck.Abort()
		return 0, nil, err
	}
	if err := ck.KeepFree(e.floorBytes()); err != nil {
		ck.Abort()
		return 0, nil, err
	}
	aside, file, err := e.keepQuarantine(&job.quarantine)
	if err != nil {
		ck.Abort()
		return 0, nil, err
	}
	state := e.nextState(result.Root, known, &result.Stats, cut, job.mapExact)
	if err := e.broken(checkCut(e.pager.State().Epoch, cut)); err != nil {
		ck.Abort()
		return 0, nil, err
	}
	term, at := job.history(e, cut)
	setEpochHistory(&state, term, at)
	setQuarantineFile(&state, file)
	setNewestEpoch(&state, job.newest())
	if err := ck.Commit(ctx, state); err != nil {
		e.dropQuarantine(aside)
		return 0, nil, err
	}
	e.checkpoints.mapExact = job.mapExact
	e.replaceRepairTree(known)
	e.completeQuarantine(aside, file)
	if job.span == nil {
		e.checkpoints.fileEnd.end(e.pager.Stats().Pending)
	}
	e.counters.merged(&result.Stats)
	e.endRebuild(job)
	return ck.Number(), result, nil
}

// nextState is the state after the pager's newest one, with another tree.
func (e *Engine) nextState(root btree.Root, known *repairtree.Tree, change *btree.Stats, cut keys.Epoch, mapExact bool) pager.State {
	state := e.pager.State()
	state.Epoch, state.Root, state.Height = cut, root.ID, uint32(root.Level+1)
	if root.Empty() {
		state.Height = 0
	}
	state.Entries = uint64(int64(state.Entries) + change.Keys)
	state.EntryBytes = uint64(int64(state.EntryBytes) + change.Bytes)
	addSystemKeys(&state, change.SystemKeys)
	side, mirror := known.Roots()
	encodeRepairTreeRoots(&state, side, mirror)
	setNewestEpoch(&state, 0)
	setMapExact(&state, mapExact)
	if e.log != nil { // else it is being replayed
		setLogSegment(&state, e.log.NewestDurableHeader())
	}
	return state
}

// build writes the pages of the new state. The statistics are of both trees.
func (e *Engine) build(ctx context.Context, ck *pager.Checkpoint, base btree.Root, job *mergeJob, cut keys.Epoch) (*btree.Result, *repairtree.Tree, error) {
	batch, sink, limit := e.blobs.Begin(ck), ck.Sink(), page.ID(0)
	in := e.mergeInput(ck, batch, sink, base, job.immutables, job.watermarks.policy(cut))
	in.Vacuum = job.deadVersions
	in.DropExpired = job.dropExpired && job.span == nil
	if job.span != nil {
		job.span.within(in)
		batch.KeepSparse()
	} else {
		limit, in.Relocate = e.relocation(ck)
		batch.MoveUntil(in.Relocate.Enough)
	}
	if job.recovering {
		in.Written, in.Workers = nil, btree.Always(runtime.GOMAXPROCS(0)) // replay has the memory of the cache, too
		in.Progress = nil
	}
	var err error
	if job.quarantine, err = e.planQuarantine(in, job); err != nil {
		return nil, nil, err
	}
	rebuild, known, err := e.rebuildIn(ctx, batch, in, job)
	if err != nil {
		return nil, nil, err
	}
	result, known, err := mergeBoth(ctx, in, known, rebuild.copiesForMirror(), cut)
	if err != nil {
		return nil, nil, err
	}
	complete, err := e.freeRepairTrees(ctx, ck, batch, rebuild, &result.Stats)
	if err != nil {
		return nil, nil, err
	}
	job.mapExact = e.checkpoints.mapExact && complete
	if err := sink.Flush(); err != nil {
		return nil, nil, err
	}
	ck.Free(result.Freed...)
	return result, known, batch.Finish(ctx, limit)
}

// replaceRepairTree makes the repair tree of a state that is durable the one in use. If the state has freed an abandoned tree, the
// search is repeated: until then that tree's pages were live, and nothing that the search reads reached them.
func (e *Engine) replaceRepairTree(next *repairtree.Tree) {
	freed := e.checkpoints.skippedPages.Abandoned()
	e.checkpoints.skippedPages = next
	if freed {
		e.rebuilds.again()
	}
}

// freeRepairTrees frees the repair trees that the merge does not use any more. Pages that a damaged inner node of one of them
// hides stay allocated. Then it reports false: the allocation map of the new state is not exact.
func (e *Engine) freeRepairTrees(
	ctx context.Context, ck *pager.Checkpoint, batch *blob.Batch, rebuild *nodeRebuild, counts *btree.Stats,
) (complete bool, err error) {
	blobs := repairtree.Blobs{Drop: batch, Store: e.blobs}
	unused, err := e.checkpoints.skippedPages.FreeUnused(ctx, &e.pager.Reader, ck, blobs)
	if err != nil {
		return false, err
	}
	replaced, err := rebuild.finish(ctx, ck, blobs, counts)
	return unused && replaced, err
}

// relocation is what a checkpoint relocates from the end of the file: the pages from limit on, zero for none. It ends early when checkpoints begin to
// lag: writers wait for the memory that this one frees.
func (e *Engine) relocation(ck *pager.Checkpoint) (limit page.ID, moves btree.Relocation) {
	relocate := relocatePagesMin
	if !e.lagging() { // else moving a part of a large file would take longer than the merge
		relocate = max(relocate, int(e.pager.Stats().Live/relocateShare))
	}
	if limit = e.checkpoints.fileEnd.begin(ck, relocate); limit > 0 {
		moves = btree.Relocation{From: limit, Max: relocate, Enough: e.lagging}
	}
	return limit, moves
}

// mergeInput is a merge of generations into base.
func (e *Engine) mergeInput(
	ck *pager.Checkpoint, batch *blob.Batch, sink *pager.Sink, base btree.Root, frozen []*generation, policy btree.Policy,
) *btree.MergeInput {
	in := &btree.MergeInput{
		Base: base, Checkpoint: ck.Number(), PageSize: e.pager.PageSize(),
		Policy:    policy,
		Input:     func() btree.Input { return e.options.disturbed(newMemInput(frozen)) },
		Source:    func() btree.Source { return pagesource.NewMerge(&e.pager.Reader) },
		Lookahead: func() btree.Input { return newMemInput(frozen) },
		Sink:      sink,
		Written:   e.pages.AdmitWritten,
		Values:    blobWriter{batch},
		Workers:   e.mergeWorkers, Damage: btree.Damage{Unreadable: IsDamage, IsLive: ck.IsLive}, Progress: e.throttleProgress,
	}
	if len(frozen) > 0 {
		in.Cuts.Keys = sample(frozen, page.KeySizeMax(e.pager.PageSize()))
	}
	if e.pager.Stats().Live >= smallTreePages {
		in.Cuts.Least = sampledCutsMin
	}
	return in
}

// mergeBoth merges into the tree, and into the repair tree the entries in skipped ranges. copies has, for each blob of the
// input that is in a skipped range, its copy for the mirror. The result counts the changes of both trees.
func mergeBoth(
	ctx context.Context, in *btree.MergeInput, known *repairtree.Tree, copies map[page.Ref]page.Ref, cut keys.Epoch,
) (*btree.Result, *repairtree.Tree, error) {
	result, err := btree.Merge(ctx, known.Outside(in))
	if err != nil {
		return nil, nil, err
	}
	next, beside, err := known.Merge(ctx, in, copies, cut)
	if err != nil {
		return nil, nil, err
	}
	result.Freed = append(result.Freed, beside.Freed...)
	result.Stats.Add(&beside.Stats)
	return result, next, nil
}

// publishedError is why log or data file could not shrink after a checkpoint. The checkpoint is durable and its
// generations are retired, so they must not be merged again; the next checkpoint shrinks both files.
type publishedError struct{ error }

func (p publishedError) Unwrap() error { return p.error }

// doesNotFit reports whether a merge failed because the disk is full. After such an error the last state is in use, and
// the same generations can be merged in another way.
func doesNotFit(err error) bool {
	_, published := errors.AsType[publishedError](err)
	return errors.Is(err, vfs.ErrNoSpace) && !published
}

// publishAndShrink lets readers see the new root, and then shrinks log and data file.
func (e *Engine) publishAndShrink(number uint64, root btree.Root, merged []*generation, cut keys.Epoch) error {
	if err := e.publish(number, root, merged, cut); err != nil {
		return err
	}
	if err := e.shrink(cut); err != nil {
		e.CheckSpace()
		return publishedError{err}
	}
	return nil
}

// publish lets readers see the new root, and retires what only readers of older views need.
func (e *Engine) publish(number uint64, root btree.Root, merged []*generation, cut keys.Epoch) error {
	e.mu.Lock()
	v := e.view.Load()
	if err := e.broken(checkOldest(v.immutables, merged)); err != nil {
		e.mu.Unlock()
		return err
	}
	frozen := v.immutables[: len(v.immutables)-len(merged) : len(v.immutables)-len(merged)]
	bytes := residentBytes(merged)
	e.memory.retired.bytes.Add(bytes)
	e.setViewLocked(&view{active: v.active, immutables: frozen, root: root, repairTree: e.checkpoints.skippedPages, quarantine: e.checkpoints.quarantine.now, checkpoint: number, inTree: cut})
	e.throttling.EndMergeLocked()
	e.updateThrottleLocked(time.Now())
	e.mu.Unlock()

	e.retire(number, merged, bytes, e.replacedIn(v))
	return nil
}

// shrink recycles the log up to the cut, and shrinks the data file.
func (e *Engine) shrink(cut keys.Epoch) error {
	return errors.Join(e.log.TruncateBefore(cut+1), e.shrinkFile())
}

// blobWriter lets a merge store large values as blobs.
type blobWriter struct{ batch blobBatch }

// blobBatch is the part of blob.Batch that a merge needs.
type blobBatch interface {
	Store(value []byte) (page.Ref, error)
	Drop(ref page.Ref) error
	ReadAhead(refs []page.Ref)
}

func (v blobWriter) Store(value []byte) (page.Ref, error) { return v.batch.Store(value) }
func (v blobWriter) Keep(ref page.Ref) (page.Ref, error)  { return ref, nil } // rows move under their id
func (v blobWriter) Drop(ref page.Ref) error              { return v.batch.Drop(ref) }
func (v blobWriter) ReadAhead(refs []page.Ref)            { v.batch.ReadAhead(refs) }

// stopIfBroken stops the store if a merge was about to write a tree that breaks an invariant. The
// durable state is the last one; what was acknowledged since is in the log. Other errors pass.
func (e *Engine) stopIfBroken(err error) error {
	if errors.Is(err, btree.ErrInvariant) {
		return e.log.Fail(err)
	}
	return err
}

package storage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// The commit pause of a bulk load and what follows it: steps 4 to 6 (bulk.go).

// BeginBulkLoadSwitch lets running commits complete although memory may be full.
func (e *Engine) BeginBulkLoadSwitch() {
	e.mu.Lock()
	e.bulkLoads.switching = true
	e.mu.Unlock()
	e.signalRoom()
}

// SealBulkLoad ends the active generation, and returns its last epoch. No commit may be between check and install, and none
// may begin until the bulk load is published or cancelled: it yields no more, because whatever waits then waits for it alone.
func (e *Engine) SealBulkLoad() keys.Epoch {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.bulkLoads.sealed = true
	e.bulkLoads.yield.cancel.Store(nil)
	active := e.view.Load().active
	active.seal()
	return keys.Epoch(active.end.Load() - 1)
}

// FinishBulkLoad makes the bulk load and all commits durable, and publishes it. If Published is true the bulk load has
// happened, even if an error is returned. After ErrFailed the outcome is unknown until the next start. The commit time is in
// microseconds since 1970, and not before that of any commit.
func (e *Engine) FinishBulkLoad(ctx context.Context, l *BulkLoad, h GCWatermarks, commitTime uint64) error {
	b, v := l.build, e.view.Load()
	b.watermarks, b.commitTime = h, commitTime
	if keys.Epoch(v.active.end.Load()) > l.epoch {
		return ErrBulkLoadOvertaken
	}
	if invariants.Enabled && !(b.ck.Prepared() && b.batch.Prepared()) {
		invariants.Fail("storage: a commit pause begins before the pages of the bulk load are prepared")
	}
	e.mu.Lock()
	table, err := e.newTable()
	e.mu.Unlock()
	if err != nil {
		return err
	}
	if err := e.commitBulkLoad(ctx, l, v); err != nil {
		e.freed(table.Free())
		if failed := e.Err(); failed != nil { // perhaps the superblock is on the device
			return fmt.Errorf("bulk load: %w", failed)
		}
		return fmt.Errorf("bulk load: %w", e.damage(err, v.root, nil))
	}
	l.durable, l.after, l.time = true, keys.Epoch(v.active.end.Load()-1), commitTime
	e.checkpoints.mapExact = b.mapExact
	e.replaceRepairTree(b.skippedPages)
	e.counters.merged(&b.stats)
	l.bounds.Epoch, l.bounds.Keys = l.epoch, l.run.Count
	e.bulkLoads.loaded.add(l.bounds)
	e.log.Skip(l.epoch + 1)
	e.publishBulkLoad(l, &generation{mem: table, first: l.epoch + 1})
	return nil
}

// commitBulkLoad merges the remaining generations and makes the state durable.
func (e *Engine) commitBulkLoad(ctx context.Context, l *BulkLoad, v *view) error {
	b, last := l.build, keys.Epoch(v.active.end.Load()-1)
	e.log.RequestFlush(last) // while the rest is merged
	rest := append([]*generation{v.active}, v.immutables[:len(v.immutables)-b.taken]...)
	e.pruner.quiesce()
	if err := e.mergeForBulkLoad(ctx, l, e.mergeInput(b.ck, b.batch, b.sink, b.root, rest, b.watermarks.policy(l.epoch))); err != nil {
		return err
	}
	if err := b.batch.Finish(ctx, 0); err != nil {
		return err
	}
	if err := b.ck.KeepFree(e.floorBytes()); err != nil {
		return err
	}
	if err := e.log.WaitDurable(ctx, last); err != nil { // what the tree holds must not be ahead of the log
		return err
	}
	state := e.nextState(b.root, b.skippedPages, &b.stats, l.epoch, b.mapExact)
	setEpochHistory(&state, e.log.TermOf(l.epoch), b.commitTime)
	return b.ck.Commit(ctx, state)
}

// publishBulkLoad lets readers see the bulk load. The generation that replaces the active one is sealed and empty: the first
// commit rotates, as after any full generation, and can try again if that fails.
func (e *Engine) publishBulkLoad(l *BulkLoad, next *generation) {
	b := l.build
	next.end.Store(uint64(next.first))
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.view.Load()
	b.merged = append([]*generation{v.active}, v.immutables...)
	b.bytes = residentBytes(b.merged)
	e.memory.retired.bytes.Add(b.bytes)
	v.active.next.Store(next)
	e.setViewLocked(&view{active: next, root: b.root, repairTree: e.checkpoints.skippedPages, checkpoint: b.ck.Number(), inTree: l.epoch})
	e.bulkLoads.switching, e.bulkLoads.sealed = false, false
	e.throttling.EndMergeLocked()
	e.updateThrottleLocked(time.Now())
}

// CompleteBulkLoad retires what only the state before a published bulk load needed.
func (e *Engine) CompleteBulkLoad(ctx context.Context, l *BulkLoad) error {
	defer e.checkpoints.mu.Unlock()
	b := l.build
	l.build = nil
	b.batch.Publish() // before the pages of older locations are retired
	e.readDeadVersionRatio(b.root)
	e.pages.AdmitReplacements(e.checkpoints.slot, b.freed, b.root)
	e.retire(b.ck.Number(), b.merged, b.bytes, nil)
	e.signalRoom()
	err := e.shrink(l.epoch)
	e.counters.checkpointed(time.Since(b.began))
	e.bulkLoads.finished.Add(1)
	e.bulkLoads.keys.Add(l.run.Count)
	e.bulkLoads.bytes.Add(l.bytes)
	// The older superblock does not have the bulk load, and the log cannot restore it: if the newer one were damaged, the
	// store would open without the bulk load. After a second, empty checkpoint both have it.
	return errors.Join(err, e.merge(context.WithoutCancel(ctx), mergeJob{watermarks: b.watermarks}))
}

// CancelBulkLoad frees the state that BuildBulkLoad began to build. The store is as it was before.
func (e *Engine) CancelBulkLoad(l *BulkLoad) {
	if l.build == nil {
		return
	}
	if l.build.ck != nil {
		l.build.ck.Abort()
	}
	l.build = nil
	e.mu.Lock()
	e.bulkLoads.switching, e.bulkLoads.sealed = false, false
	e.mu.Unlock()
	e.throttleFail()
	e.checkpoints.merging.Store(false)
	e.checkpoints.mu.Unlock()
	e.signalRoom()
	e.checkpoints.request()
}

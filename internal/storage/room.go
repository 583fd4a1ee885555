package storage

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// Demand is what a record will need of memory and of the log.
type Demand struct {
	Body    *batch.Body
	More    int  // bytes that Body does not have yet
	Records int  // operations that Body does not have yet
	Frees   bool // it has nothing but deletions; see wal.Log.Prepare
}

// logBytes is the size of the record's body.
func (d *Demand) logBytes() int { return d.Body.Size() + d.More }

// memoryBytes is what the record takes in a memtable.
func (d *Demand) memoryBytes() int64 {
	return int64(memtable.MaxSizeOf(d.Body.Count()+d.Records, d.logBytes()))
}

// AwaitRoom waits until a record would find memory and a log segment at once, and reserves neither: other records may take them. A caller for
// which others will wait while it waits calls it before that. The errors are those of AdvanceGeneration.
//
// For a part of StallMax it waits until the record leaves memory for those of others: otherwise the next of them would wait until it is merged. So it also
// replaces an active generation that is full, which its next writer would do: only then can that be merged. It waits for the merges of what was written
// before, and of nothing later: beside writers that never pause there is always something to merge. While merges are blocked it does not: on a full disk
// the record may be the deletion that makes space.
func (e *Engine) AwaitRoom(ctx context.Context, d *Demand) error {
	if e.fits(d) {
		return nil
	}
	since := e.Reserved()
	soon, cancel := context.WithTimeoutCause(ctx, e.options.StallMax/4, errNoRoomBeside)
	err := e.awaitRoom(soon, func() (obstacle, error) {
		if full := e.fullBeside(d); full != nil {
			if o, err := e.advanceGeneration(full, 0, nil); o.ready != nil || err != nil {
				return o, err
			}
		}
		return e.obstacleOf(d, since)
	})
	cancel()
	if err != errNoRoomBeside { //nolint:errorlint // made here
		return err
	}
	return e.awaitRoom(ctx, func() (obstacle, error) { return e.obstacleOf(d, 0) })
}

var errNoRoomBeside = errors.New("storage: there is no memory for a large record beside others")

// HasRoom reports whether AwaitRoom would not wait.
func (e *Engine) HasRoom(d *Demand) bool {
	if e.fits(d) {
		return true
	}
	o, err := e.obstacleOf(d, 0)
	return o.ready == nil || err != nil
}

// fits reports whether the active generation has room for a record.
func (e *Engine) fits(d *Demand) bool {
	g := e.view.Load().active
	return !e.oversized(d.logBytes()) && !g.sealed() && g.segment != nil && g.segment.Fits(d.logBytes()) &&
		int64(g.mem.Bytes())+d.memoryBytes() <= e.memory.memtableBytes
}

// fullBeside seals the active generation if that is full, and would fill memory together with a record, which no merge of others would change. nil if not.
func (e *Engine) fullBeside(d *Demand) *generation {
	v := e.view.Load()
	if g := v.active; !e.merges(v) && int64(g.mem.Bytes()) > e.memory.memtableBytes && e.immutableBytesOf(v)+d.memoryBytes() > e.memory.immutableBytes.Load() {
		g.seal()
		return g
	}
	return nil
}

// obstacleOf is what a rotation for a record would have to wait for; with an epoch also the merges of what was written up to it, if the record would
// fill memory together with what is there.
func (e *Engine) obstacleOf(d *Demand, since keys.Epoch) (obstacle, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.view.Load()
	if o, err := e.memoryObstacleLocked(v); o.ready != nil || err != nil {
		return o, err
	}
	if since != 0 && e.checkpoints.blocked.Load() == nil &&
		e.memory.reclaimed.Load() <= uint64(since) && e.merges(v) && e.immutableBytesOf(v)+d.memoryBytes() > e.memory.immutableBytes.Load() {
		e.checkpoints.request()
		return obstacle{ready: e.memory.room}, nil
	}
	size := d.logBytes()
	if attempt := e.log.Prepare(size, d.Frees && e.oversized(size)); attempt != nil {
		return obstacle{attempt.Done(), attempt, e.log.Oversized(size)}, nil
	}
	return obstacle{}, nil
}

// obstacle is what a rotation has to wait for. The zero value is none.
type obstacle struct {
	ready   <-chan struct{}  // delivers when the rotation should be tried again
	segment *wal.Preparation // of the log segment that is not ready; nil if memory is full
	large   bool             // the record needs a segment that is larger than the others
}

// final is the reason not to try again now, or nil.
func (o obstacle) final() error {
	if o.segment == nil {
		return nil
	}
	err := o.segment.Err()
	if errors.Is(err, vfs.ErrNoSpace) && o.segment.Oversized() && !o.large {
		return nil // for the record of another writer
	}
	if errors.Is(err, vfs.ErrNoSpace) || errors.Is(err, ErrFailed) || errors.Is(err, wal.ErrClosed) {
		return fmt.Errorf("rotate: %w", err)
	}
	return nil
}

// timedOut is the error of a writer that has waited for Options.StallMax.
func (o obstacle) timedOut(e *Engine) error {
	if o.segment == nil {
		e.counters.refused.Add(1)
		return ErrMemoryFull
	}
	if cause := e.log.Stats().Preparing; cause != nil {
		return fmt.Errorf("%w: %w", ErrNoSegment, cause)
	}
	return fmt.Errorf("%w: the device does not answer", ErrNoSegment)
}

// awaitRoom repeats the attempt until memory is not full and a log segment is ready.
func (e *Engine) awaitRoom(ctx context.Context, attempt func() (obstacle, error)) error {
	var deadline, yield <-chan time.Time
	stalled, given := false, uint64(math.MaxUint64)
	for {
		o, err := attempt()
		if o.ready == nil || err != nil {
			return err
		}
		if deadline == nil {
			deadline = time.After(e.options.StallMax)
		}
		if o.segment == nil && !stalled {
			stalled = true
			e.counters.stalls.Add(1)
			start := time.Now()
			defer func() { e.counters.stallNanos.Add(uint64(time.Since(start))) }()
			yield = time.After(e.options.StallMax / 2)
		}
		select {
		case <-o.ready:
		case <-yield: // memory becomes free with a checkpoint, which a bulk load prevents, and for which what it rebuilds may be too much
			e.yieldToCommits()
			continue
		case <-deadline:
			return o.timedOut(e)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := o.final(); err != nil {
			room := e.segmentToCome(err, o.large, &given)
			if room == nil {
				return err
			}
			select {
			case <-room:
			case <-deadline:
				return err
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	}
}

// memoryObstacleLocked is what any rotation has to wait for before it may ask for a log segment.
func (e *Engine) memoryObstacleLocked(v *view) (obstacle, error) {
	if err := e.Err(); err != nil {
		return obstacle{}, err
	}
	if e.bulkLoads.sealed {
		return obstacle{ready: e.memory.room}, nil // the next generation begins after the epoch of the bulk load
	}
	if e.fullLocked(v) {
		if blocked := e.checkpoints.blocked.Load(); blocked != nil {
			return obstacle{}, *blocked
		}
		e.checkpoints.request()
		return obstacle{ready: e.memory.room}, nil
	}
	return obstacle{}, nil
}

// fullLocked reports whether there is no memory for another generation. With nothing to wait for, a generation of any size becomes immutable:
// only then can it be merged.
func (e *Engine) fullLocked(v *view) bool {
	return !e.bulkLoads.switching && e.immutableBytesOf(v) > e.memory.immutableBytes.Load() && e.merges(v)
}

// merges reports whether a merge makes memory free.
func (e *Engine) merges(v *view) bool {
	return len(v.immutables) > 0 || e.memory.retired.bytes.Load() > 0
}

// AwaitsMerge reports whether a rotation would wait until generations are merged, because memory is full.
func (e *Engine) AwaitsMerge() bool {
	e.Reclaim() // what was merged before: the rotation would wait for that, too
	e.mu.Lock()
	defer e.mu.Unlock()
	v := e.view.Load()
	return len(v.immutables) > 0 && e.fullLocked(v)
}

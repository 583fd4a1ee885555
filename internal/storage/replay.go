package storage

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// replayer fills generations with the records of the log in log order, which is the order of commit
// sequence numbers (epochs). So the last writer of a key is the same as before the crash.
//
// A log may be far longer than memory, because checkpoints may have been stopped for hours. When
// the generations have used up the memory of immutable memtables and of the cache, which has no
// readers yet, they are merged into the tree and their tables are filled again. Merging before the
// end of the log is known to be intact does not change what recovery may decide: the merged epochs
// are consecutive, and all of them were read completely. If a later record is damaged, the store
// refuses to start, as it would have otherwise, and the tree has more of the commits before the
// damage. If the log ends in a torn record, that record is after everything merged. No segment is
// removed before the whole log was read, so that the older superblock still has the log that it
// needs. After a crash the next recovery continues after the last superblock.
type replayer struct {
	ctx        context.Context // ends the replay
	engine     *Engine
	inserter   memtable.Inserter
	filled     []*generation // oldest first; the last one is being filled
	newest     keys.Epoch    // of the records that were replayed, and those of lost epochs
	commits    bool          // there were other records than those of lost epochs
	continues  bool          // what is inserted has the epoch of what is before it, as parts of a bulk load have
	term       keys.Term     // of the newest record
	commitTime uint64        // the latest of the records and of the tree
	root       btree.Root    // of the tree, with everything before them
	blocked    bool          // a merge failed on a full disk or on damage: the rest stays in memory, and checkpoints try again
	merges     int
	peak       int64 // most bytes that memtables have taken

	// Progress is reported in whole segments: nothing else of the log's size is known in advance.
	after        keys.Epoch
	segments     []wal.SegmentInfo
	passed       int // segments that replay has begun with
	lastReported time.Time
}

// ReplayProgress says how far the replay of a long log is.
type ReplayProgress struct {
	Bytes, BytesTotal int64 // of log files
	Epoch             keys.Epoch
	Checkpoints       int // made to keep memory bounded
}

// replayReportEvery is the time between two progress reports. A shorter replay reports nothing.
const replayReportEvery = 2 * time.Second

func (r *replayer) apply(c wal.Commit) (err error) {
	if c.Skipped != 0 {
		err = r.recordSkipped(&c)
	} else {
		err = r.insert(c.Epoch, c.Body)
		r.newest, r.commits = c.Epoch, true
	}
	r.term = c.Term
	return err
}

// recordSkipped puts a record of what a crash lost into the memtable. The merge that lets the log go, and the skip record with it, takes the record along.
// What a repair of the log removed, which the tree may have in part, is left to the owner of the engine.
func (r *replayer) recordSkipped(c *wal.Commit) error {
	state := r.engine.pager.State()
	repaired := c.Epoch-c.Skipped >= wal.EpochWindow
	if repaired || featureLevel(&state) < keys.FeatureLevelHistory {
		return nil
	}
	body, err := removedBody(keys.EpochRange{First: c.Skipped, Last: c.Epoch})
	if err != nil {
		return err
	}
	r.newest = c.Epoch
	return r.insert(c.Epoch, body.Bytes())
}

// recordLost does the same for what this start finds lost: the first log segment will begin with that skip record. A commit could not do it. On a full
// disk the log has no segment for one yet.
func (e *Engine) recordLost(first *generation, found *wal.Recovery) error {
	state, lost := e.pager.State(), keys.EpochRange{First: found.Last + 1, Last: found.Next() - 1}
	if lost.Last < lost.First || featureLevel(&state) < keys.FeatureLevelHistory {
		return nil
	}
	body, err := removedBody(lost)
	if err != nil {
		return err
	}
	var inserter memtable.Inserter
	if err := first.mem.Secure(&inserter, memtable.MaxSize(body)); err != nil {
		return err
	}
	return first.mem.Apply(&inserter, body, lost.Last, true)
}

func removedBody(lost keys.EpochRange) (*batch.Body, error) {
	var b batch.Builder
	key, value := keys.RemovedRecord(lost)
	b.SetRecord(keys.SpaceSystem, key, value)
	return b.Finish()
}

func (r *replayer) insert(epoch keys.Epoch, body []byte) error {
	if r.ctx.Err() != nil {
		return context.Cause(r.ctx)
	}
	if err := r.progress(epoch); err != nil {
		return err
	}
	if len(body) == 0 {
		return nil // a no-op record
	}
	if err := batch.Validate(body); err != nil {
		return fmt.Errorf("replay of epoch %d: %w", epoch, err)
	}
	mem, err := r.table(epoch)
	if err != nil {
		return err
	}
	whole := batch.Contiguous(body)
	header, err := batch.HeaderOf(body)
	if err != nil {
		return err
	}
	r.filled[len(r.filled)-1].noteTime(header.Time)
	r.commitTime = max(r.commitTime, header.Time)
	if err := mem.Secure(&r.inserter, memtable.MaxSize(whole)); err != nil {
		return err
	}
	return mem.Apply(&r.inserter, whole, epoch, true)
}

// table is the memtable to fill, a new one when the last is full.
func (r *replayer) table(epoch keys.Epoch) (*memtable.Table, error) {
	if n := len(r.filled); n > 0 && int64(r.filled[n-1].mem.Bytes()) < r.engine.memory.memtableBytes {
		return r.filled[n-1].mem, nil
	}
	if r.continues {
		r.seal(epoch + 1)
	} else {
		r.seal(epoch)
	}
	if err := r.makeRoom(); err != nil {
		return nil, err
	}
	mem, err := r.engine.newTable()
	if err != nil {
		return nil, err
	}
	r.filled = append(r.filled, &generation{mem: mem, first: epoch})
	return mem, nil
}

// seal ends the last generation before epoch.
func (r *replayer) seal(epoch keys.Epoch) {
	if n := len(r.filled); n > 0 && !r.filled[n-1].sealed() {
		r.filled[n-1].end.Store(uint64(epoch))
		r.filled[n-1].term = r.term
	}
}

// used is the memory of the filled generations.
func (r *replayer) used() (bytes int64) {
	for _, g := range r.filled {
		bytes += int64(g.mem.Bytes())
	}
	r.peak = max(r.peak, bytes)
	return bytes
}

// makeRoom merges the filled generations if one more memtable would exceed the budget.
func (r *replayer) makeRoom() error {
	used := r.used()
	if used+r.engine.memory.memtableBytes <= r.engine.memory.immutableBytes.Load()+r.engine.options.CacheBytes {
		return nil
	}
	return r.mergeIfPossible()
}

// complete gives the cache its memory back. After a repair of the log the tree may have newer versions than the log, from
// an interrupted merge in steps. Reads take what a memtable has for newer, so the log is merged before the first one, or, on
// a full disk, a memtable gets what the tree has (keepAhead). Records of what crashes lost are merged, if there is nothing else and the disk may be full, so
// that the log can give up their segments (firstGeneration).
func (r *replayer) complete() error {
	e := r.engine
	state := e.pager.State()
	used, ahead := r.used(), r.newest < logProof(&state).Durable
	onlyLost := !r.commits && e.reserveTaken()
	if used > e.memory.immutableBytes.Load() || ahead || onlyLost {
		if err := r.mergeIfPossible(); err != nil {
			return err
		}
		if ahead && r.blocked {
			if err := r.keepAhead(); err != nil {
				return err
			}
		}
		used = r.used()
	}
	for n := int64(len(e.memory.pool.pooled)); n > 0 && used+n*e.memory.memtableBytes > e.memory.immutableBytes.Load(); n-- {
		e.freed(e.memory.pool.take().Free())
	}
	return nil
}

// mergeIfPossible merges the filled generations. If that is not possible now, they stay in memory,
// whatever the budget is.
func (r *replayer) mergeIfPossible() error {
	if len(r.filled) == 0 || r.blocked {
		return nil
	}
	err := r.merge()
	if errors.Is(err, vfs.ErrNoSpace) || errors.Is(err, ErrDamaged) {
		r.blocked = true
		return nil
	}
	return err
}

// merge makes the filled generations durable in the tree. The tree is not ahead of the log, because
// what wal.Recover passes on is durable. All versions are kept: which of them the retention needs is a record of the store
// that cannot be read yet.
func (r *replayer) merge() error {
	e := r.engine
	job := mergeJob{recovering: true}
	for i := len(r.filled) - 1; i >= 0; i-- {
		job.immutables = append(job.immutables, r.filled[i])
	}
	cut := job.cut(0)
	job.watermarks = GCWatermarks{Visible: cut, Snapshots: []keys.Epoch{1}}
	before := e.checkpoints.quarantine.now
	number, result, err := e.mergeTree(r.ctx, r.root, &job, cut)
	if err != nil {
		return fmt.Errorf("checkpoint while the log is replayed: %w", e.damage(err, btree.Root{}, nil))
	}
	e.dropQuarantine(before) // no reader has seen it
	r.root = result.Root
	e.checkpoints.pins.release(e.pager, number)
	for _, g := range r.filled {
		e.memory.pool.pooled = append(e.memory.pool.pooled, g.mem) // the next tables take their memory
	}
	r.filled = r.filled[:0]
	r.merges++
	return nil
}

// progress notes that replay has reached epoch.
func (r *replayer) progress(epoch keys.Epoch) (err error) {
	if r.segments == nil {
		if r.segments, err = wal.Segments(r.engine.fs, r.engine.options.Dir); err != nil {
			return err
		}
	}
	if r.passed == len(r.segments) || r.segments[r.passed].First > epoch {
		return nil
	}
	p := ReplayProgress{Epoch: epoch, Checkpoints: r.merges}
	for r.passed < len(r.segments) && r.segments[r.passed].First <= epoch {
		r.passed++
	}
	if r.engine.options.OnReplay == nil || time.Since(r.lastReported) < replayReportEvery {
		return nil
	}
	r.lastReported = time.Now()
	for i, s := range r.segments {
		if i+1 < len(r.segments) && r.segments[i+1].First <= r.after+1 {
			continue // replay began after it
		}
		if p.BytesTotal += s.Bytes; i+1 < r.passed {
			p.Bytes += s.Bytes
		}
	}
	r.engine.options.OnReplay(p)
	return nil
}

func (r *replayer) free() (err error) {
	for _, g := range r.filled {
		err = errors.Join(err, g.mem.Free())
	}
	return err
}

package storage

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/wal"
)

// ErrRotating means that the active generation is full: call AdvanceGeneration outside the guard of the slot, and retry.
var ErrRotating = errors.New("storage: generation is rotating")

// generation is one log segment and the memtable that its records fill. They rotate together.
//
// Invariant: every epoch in [first, end) has its versions in mem once visible >= end-1; end is known once sealed.
type generation struct {
	segment *wal.Segment // nil for a generation that recovery filled
	mem     *memtable.Table
	first   keys.Epoch
	end     atomic.Uint64              // first epoch of the next generation, zero while active
	next    atomic.Pointer[generation] // set when the next one is published

	commitTime atomic.Uint64 // the latest of its commits; see noteTime
	term       keys.Term     // of its last epoch, of a generation that recovery filled; constant once it is published
}

func (g *generation) sealed() bool { return g.end.Load() != 0 }

// seal ends the generation, unless that has happened.
func (g *generation) seal() {
	if g.sealed() {
		return
	}
	if claim, outcome := g.segment.Seal(); outcome == wal.Crossed {
		g.end.Store(uint64(claim.Epoch))
	}
	for !g.sealed() {
		runtime.Gosched() // another writer has crossed the end, and is about to store it
	}
}

// noteTime records the time of a commit before its epoch is installed. The clock moves once in a millisecond, so that nearly
// all commits only load the field.
func (g *generation) noteTime(at uint64) {
	for known := g.commitTime.Load(); at > known && !g.commitTime.CompareAndSwap(known, at); {
		known = g.commitTime.Load()
	}
}

// residentBytes is the memory of the generations' memtables.
func residentBytes(generations []*generation) (bytes int64) {
	for _, g := range generations {
		bytes += int64(g.mem.Resident())
	}
	return bytes
}

// reserve is Engine.Reserve in a generation that no other goroutine sees yet, with the memtable's space secured before.
func (g *generation) reserve(w *Writer, body *batch.Body) error {
	claim, outcome := g.segment.Reserve(body.Size())
	if outcome == wal.Crossed {
		g.end.Store(uint64(claim.Epoch))
	}
	if outcome != wal.Reserved {
		return errTooLarge // the segment was made for a record of this size
	}
	w.generation, w.reservation = g, claim
	return nil
}

// secure is SecureBelow, up to the size of a memtable, with the error for a client: nothing was written, and another attempt may succeed.
func (e *Engine) secure(mem *memtable.Table, w *Writer, body *batch.Body) error {
	err := mem.SecureBelow(&w.inserter, memtable.MaxSize(body), int(e.memory.memtableBytes))
	if errors.Is(err, memtable.ErrFull) {
		return err
	}
	if err != nil {
		return e.noMemory(err)
	}
	mem.Announce(&w.inserter, body)
	return nil
}

// Expect prepares for a look-up of the newest version of key, which the caller will make soon.
func (e *Engine) Expect(key []byte) { e.view.Load().active.mem.Expect(key) }

// noMemory is the error for a client when the system has no memory for a memtable.
func (e *Engine) noMemory(err error) error {
	e.counters.refused.Add(1)
	e.checkpoints.request() // the memory of merged memtables is used again
	return fmt.Errorf("%w: %w", ErrMemoryFull, err)
}

// Reserved is the newest epoch that is reserved. Later ones get times that are not before the time of the call; see Stamp.
func (e *Engine) Reserved() keys.Epoch {
	e.mu.Lock() // a record that opens its generation is reserved before the generation is published
	defer e.mu.Unlock()
	g := e.view.Load().active
	if g.segment == nil { // after a bulk load
		return keys.Epoch(g.end.Load()) - 1
	}
	return g.segment.Position().Epoch - 1
}

// LogMark is where the record after the newest one that is reserved will begin in the log. It is the zero mark after a bulk load,
// until something is written.
func (e *Engine) LogMark() wal.TailMark {
	e.mu.Lock() // see Reserved
	defer e.mu.Unlock()
	if s := e.view.Load().active.segment; s != nil {
		return s.Mark()
	}
	return wal.TailMark{}
}

// Epoch is the epoch that w has reserved last.
func (w *Writer) Epoch() keys.Epoch { return w.reservation.Epoch }

// Writer is one session's state on the commit path. It is not for concurrent use.
type Writer struct {
	inserter    memtable.Inserter
	generation  *generation
	reservation wal.Reservation
	covered     bool          // AwaitReserve has found pages for a large record, which others may take until AdvanceGeneration
	Ends        bool          // set by the session: its commit ends what clients have left, as keys after their deadlines; see Throttle
	delayOwed   time.Duration // wait for earlier commits that Throttle has not imposed yet
	delayLeft   time.Duration // rest of waits that ended with their requests; see Throttle
	timer       *time.Timer   // of Throttle, once it has waited with a deadline
	Scratch     []byte        // for the session: a value to compare with
}

// Reserve takes the next epoch and the offset of body in the log, after it has secured space in the memtable. It returns
// ErrRotating when the active generation is full, or the record needs one of its own. The caller is inside its slot's protection, and stays there until Install.
func (e *Engine) Reserve(w *Writer, body *batch.Body) (keys.Epoch, error) {
	return e.reserveIn(e.view.Load().active, w, body)
}

// ReserveValidated is Reserve for a commit whose validation has begun. If another generation has become the active one meanwhile it returns
// ErrRotating, and the validation has to begin again: everything that was written since must be in one segment
// (WrittenSince).
func (e *Engine) ReserveValidated(v *Validation, w *Writer, body *batch.Body) (keys.Epoch, error) {
	return e.reserveIn(v.view.active, w, body)
}

func (e *Engine) reserveIn(g *generation, w *Writer, body *batch.Body) (keys.Epoch, error) {
	w.generation, w.inserter.Ordered = g, true
	claim, outcome := wal.Reservation{}, wal.Full
	switch {
	case g.sealed() || e.oversized(body.Size()):
	case int64(g.mem.Bytes()) >= e.memory.memtableBytes:
		claim, outcome = g.segment.Seal()
	default:
		switch err := e.secure(g.mem, w, body); {
		case err == nil:
			claim, outcome = g.segment.Reserve(body.Size())
		case errors.Is(err, memtable.ErrFull): // others have filled it meanwhile
			claim, outcome = g.segment.Seal()
		default:
			return 0, err
		}
	}
	switch outcome {
	case wal.Reserved:
		if invariants.Enabled && !g.contains(claim.Epoch) {
			_ = e.broken(fmt.Errorf("epoch %d was reserved in the generation from %d on", claim.Epoch, g.first))
		}
		w.reservation = claim
		return claim.Epoch, nil
	case wal.Crossed:
		g.end.Store(uint64(claim.Epoch))
	case wal.TooLarge:
		return 0, errTooLarge // unreachable: batches are limited before
	}
	return 0, ErrRotating
}

var errTooLarge = errors.New("storage: commit is larger than a log record can be")

// Stamp gives the commit its time, if the body has one. It is called after the reservation, so that every epoch that is not
// reserved yet when the clock shows a time gets that time or a later one.
func (e *Engine) Stamp(w *Writer, body *batch.Body, at uint64) {
	if body.SetTime(at) {
		w.generation.noteTime(at)
	}
}

// Record copies body into the log at the offset that Reserve took. From then on it may become durable.
func (e *Engine) Record(w *Writer, body *batch.Body) {
	record := w.generation.segment.Record(w.reservation)
	for piece := range body.Pieces {
		record.Append(piece)
	}
	record.Publish()
}

// Install puts the versions of body into the memtable. Neither it nor Record allocates or blocks. An error matches ErrFailed and is final: the record
// is in the log and its versions are not all in the memtable, so the epoch must not become visible, and no later one can.
func (e *Engine) Install(w *Writer, body *batch.Body, sync bool) error {
	err := w.generation.mem.Apply(&w.inserter, body, w.reservation.Epoch, sync)
	if err == nil {
		return nil
	}
	if !errors.Is(err, memtable.ErrStarved) {
		panic("storage: a body that this process built is malformed: " + err.Error())
	}
	return e.log.Fail(fmt.Errorf("install epoch %d: %w", w.reservation.Epoch, err))
}

// GiveBack gives memory back that Reserve has secured for a large record and Install has not used.
func (e *Engine) GiveBack(w *Writer) { w.inserter.GiveBack() }

// NoOp publishes a no-op record instead of the commit that Reserve was for.
func (e *Engine) NoOp(w *Writer) { w.generation.segment.PublishNoOp(w.reservation) }

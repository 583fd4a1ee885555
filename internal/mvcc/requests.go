package mvcc

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// A write with a request id is applied at most once, however often it is sent.
//
//	latch keys and id ─► look the id up ─► conditions, reserve ... as every commit; the record of the id is in the same batch
//	                         │
//	                         └─ found: nothing is written; the outcome is that of the first attempt
//
// An id is a UUID of version 7, which begins with its time. Records are kept for a window. The cut-off is the time up to
// which records may be missing; it is a record, too, and never goes back. So an id whose record is not found, and whose
// time is at or before the cut-off, is refused: nothing can tell whether it was executed.
//
// Invariants:
//   - A record exists if and only if its commit does, at the same epoch: it is an operation of the same batch.
//   - The id's latch is held from the look-up to the installation, so that of two attempts at once the second finds the
//     first one's record.
//   - The cut-off is read after the look-up. Merges drop records only up to a cut-off that is durable, and that was
//     installed before. So a look-up that misses a dropped record sees that cut-off.
//   - A state of the data file has the cut-off up to which its records may be missing: a repair of the log may drop what is
//     after the state.
//   - No record in the tree has an id with a later time than inTree: a commit notes the time before it is installed, and a
//     merge raises inTree to the times noted by then before it takes anything from the memtables.
//   - A refusal because of the state of the database is returned only if the look-up was not before that state: else
//     another attempt, committed between the two, could be what changed the state.

// RequestID is the id that a client gives to a write, the same in all attempts.
type RequestID [16]byte

// ErrRequestID means that bytes are not a UUID of version 7.
var ErrRequestID = errors.New("mvcc: a request id has 16 bytes, those of a UUID of version 7")

// ToRequestID checks the bytes of an id.
func ToRequestID(b []byte) (id RequestID, err error) {
	const version, variant = 7, 0b10
	if len(b) != len(id) || b[6]>>4 != version || b[8]>>6 != variant {
		return id, ErrRequestID
	}
	return RequestID(b), nil
}

// Time is when the client made the id by its own clock, in milliseconds since 1970.
func (id *RequestID) Time() uint64 { return binary.BigEndian.Uint64(id[:]) >> 16 }

// Request is what a write says of the request that it answers.
type Request struct {
	ID       RequestID
	Hash     uint32 // of what the request asks for; another attempt must have the same
	Identity uint32 // hash of the user; zero without users
	Method   uint8  // what Result encodes; of the layer above
	// Result, if set, encodes what the answer has beside the epoch. It is called once the outcome is computed.
	Result func() []byte
}

// OutcomeState is what became of a request.
type OutcomeState uint8

// The states of a request. The first three are also what a record begins with.
const (
	OutcomeApplied       OutcomeState = iota + 1
	OutcomeResultDropped              // applied, and the result was too long to be kept
	OutcomeCancelled                  // not applied, and never will be
	OutcomeNotApplied                 // not applied so far; an attempt that is still under way may be
	OutcomeExpired                    // too old to be known
)

// Outcome is what is known of a request.
type Outcome struct {
	State  OutcomeState
	Epoch  keys.Epoch // of its commit
	Method uint8
	// Identity is that of the request which was applied or cancelled.
	Identity uint32
	Result   []byte
}

// AppliedError means that a request was applied before, by another attempt. Nothing was written now.
type AppliedError struct{ Outcome Outcome }

func (e *AppliedError) Error() string {
	return fmt.Sprintf("mvcc: the request was applied at epoch %d", e.Outcome.Epoch)
}

var (
	// ErrRequestReused means that another request was applied under the same id.
	ErrRequestReused = errors.New("mvcc: the request id belongs to another request")
	// ErrRequestCancelled means that the client has fenced the request off: it is not applied.
	ErrRequestCancelled = errors.New("mvcc: the request was cancelled")
)

// RequestExpiredError means that the id is too old: whether an earlier attempt was applied is not known.
type RequestExpiredError struct{ Cutoff, Now uint64 } // milliseconds since 1970

func (e *RequestExpiredError) Error() string {
	return "mvcc: the request id is older than what is kept of requests; whether the request was executed is not known"
}

// The record of a request: state, method, hash, identity, result.
const (
	recordHeaderBytes = 10
	// resultBytesMax is the longest result that is kept.
	resultBytesMax = 1 << 10
	// recordBytesAbout is what a record without a result takes in log and tree, for the bound in bytes.
	recordBytesAbout = 90
)

func (r *Request) appendRecord(dst []byte, state OutcomeState) []byte {
	var result []byte
	if state == OutcomeApplied && r.Result != nil {
		if result = r.Result(); len(result) > resultBytesMax {
			state, result = OutcomeResultDropped, nil
		}
	}
	dst = append(dst, byte(state), r.Method)
	dst = binary.LittleEndian.AppendUint32(dst, r.Hash)
	dst = binary.LittleEndian.AppendUint32(dst, r.Identity)
	return append(dst, result...)
}

// requestUser is the part of a record's key after the keyspace.
func requestUser(dst []byte, id *RequestID) []byte {
	return append(append(dst, keys.SystemRequest), id[:]...)
}

// Identify makes the commit be applied at most once. It is called once the result can be computed; for operations that
// come in key order best before the first, because the record's key is before theirs. Nil does nothing.
func (w *Write) Identify(r *Request) {
	if r == nil {
		return
	}
	w.request = r
	state := OutcomeApplied
	if w.fence {
		state = OutcomeCancelled
	}
	w.recordKey = requestUser(w.recordKey[:0], &r.ID)
	w.record = r.appendRecord(w.record[:0], state)
	w.Batch.SetRecord(keys.SpaceSystem, w.recordKey, w.record)
}

// setRequest is Identify for operations that are computed under the latches, which Identify follows.
func (w *Write) setRequest(r *Request) {
	if r != nil {
		w.request = r
		w.recordKey = requestUser(w.recordKey[:0], &r.ID)
		w.Batch.SetRecord(keys.SpaceSystem, w.recordKey, nil)
	}
}

// checkRequest looks the id of a write up. The caller holds its latch. The error is *AppliedError,
// ErrRequestCancelled, ErrRequestReused, *RequestExpiredError, or that of a read.
func (x *Session) checkRequest(w *Write) error {
	out, err := x.lookUp(w.request, !w.fence)
	switch {
	case err != nil:
		return err
	case out.State == OutcomeNotApplied:
		return nil
	case out.State == OutcomeExpired:
		return &RequestExpiredError{Cutoff: x.store.requests.cutoff.Load(), Now: x.store.now()}
	case out.State == OutcomeCancelled && !w.fence:
		return ErrRequestCancelled
	}
	return &AppliedError{out}
}

// expectRecord lets the look-up of the id wait less for memory: its record has a random place.
func (x *Session) expectRecord(r *Request) {
	x.key = requestUser(append(x.key[:0], byte(keys.SpaceSystem)), &r.ID)
	x.store.engine.Expect(x.key)
}

// lookUp finds what is known of a request. The caller holds the latch of its id.
func (x *Session) lookUp(r *Request, compare bool) (out Outcome, err error) {
	x.key = requestUser(append(x.key[:0], byte(keys.SpaceSystem)), &r.ID)
	x.reached(stepLookUp)
	x.slot.Enter()
	defer x.slot.Leave()
	v, ok, err := x.newestRecord(r)
	if err != nil {
		return out, err
	}
	if !ok || !v.Kind.HasValue() {
		if r.ID.Time() <= x.store.requests.cutoff.Load() {
			return Outcome{State: OutcomeExpired}, nil
		}
		return Outcome{State: OutcomeNotApplied}, nil
	}
	x.reveals(v.Sync, v.Epoch)
	record, err := x.reader.AppendValue(nil, v)
	if err != nil {
		return out, ofKey(err, x.key)
	}
	if len(record) < recordHeaderBytes {
		return out, fmt.Errorf("mvcc: the record of request %x has %d bytes", r.ID, len(record))
	}
	cancelled := OutcomeState(record[0]) == OutcomeCancelled // by a fence, which does not know what is asked for
	if compare && !cancelled && (binary.LittleEndian.Uint32(record[2:]) != r.Hash || binary.LittleEndian.Uint32(record[6:]) != r.Identity) {
		return out, ErrRequestReused
	}
	return Outcome{
		State: OutcomeState(record[0]), Epoch: v.Epoch, Method: record[1], Identity: binary.LittleEndian.Uint32(record[6:]), Result: record[recordHeaderBytes:],
	}, nil
}

// newestRecord reads the record of the request whose key is in x.key. A fresh id is newer than all in the tree, and mostly
// than all in immutable memtables, so that the active one alone decides: it costs no page and one cache miss, and a damaged
// page among old records does not refuse new requests. The state is pinned before the bounds are loaded: if a merge has
// taken the record from the memtables meanwhile, it has raised the bound before.
func (x *Session) newestRecord(r *Request) (v storage.Version, ok bool, err error) {
	p, at, window := x.store.engine.Pin(), r.ID.Time(), &x.store.requests
	if at > window.inTree.Load() {
		find := storage.Pinned.Find
		if at > window.latestBefore(p.ActiveSince()) {
			find = storage.Pinned.FindActive
		}
		if !find(p, x.key, keys.MaxEpoch).Found() {
			return v, false, nil
		}
	}
	return x.reader.Newest(x.key)
}

// RequestAheadMax is how far the time of an id may be ahead of the server's clock: the layer above refuses others.
const RequestAheadMax = 5 * time.Minute

// orApplied replaces a refusal by *AppliedError if another attempt of the request was applied meanwhile, or by ErrRequestReused if another
// request with its id was.
func (x *Session) orApplied(ctx context.Context, r *Request, err error) error {
	if err == nil || r == nil || errors.As(err, new(*AppliedError)) || errors.As(err, new(*NotPermittedError)) {
		return err
	}
	out, failed := x.outcome(ctx, r, true)
	if errors.Is(failed, ErrRequestReused) {
		return failed
	}
	if failed == nil && (out.State == OutcomeApplied || out.State == OutcomeResultDropped) {
		return &AppliedError{out}
	}
	return err
}

// Outcome is what is known of a request; its hash is not compared. The answer is linearizable.
func (x *Session) Outcome(ctx context.Context, r *Request) (Outcome, error) {
	return x.outcome(ctx, r, false)
}

func (x *Session) outcome(ctx context.Context, r *Request, compare bool) (Outcome, error) {
	w := &x.buffers.ranged.write
	w.Reset()
	w.Batch.Delete(keys.SpaceSystem, requestUser(nil, &r.ID)) // for the latch
	if err := x.lock(ctx, w); err != nil {
		return Outcome{}, err
	}
	out, err := x.lookUp(r, compare)
	x.unlock()
	return out, x.finish(ctx, err)
}

// Fence returns what became of a request. If it was not applied, it is cancelled: no attempt that is still under way
// can be applied after that. The epoch is that of the commit that says so, or zero. While the disk is full, only what is known already is told.
func (x *Session) Fence(ctx context.Context, r *Request, d Durability) (Outcome, keys.Epoch, error) {
	w := &x.buffers.ranged.write
	w.Reset()
	w.Durability, w.fence, w.own = d, true, true
	w.Identify(r)
	epoch, err := x.commit(ctx, w)
	var applied *AppliedError
	switch {
	case errors.As(err, &applied):
		return applied.Outcome, 0, nil
	case errors.As(err, new(*RequestExpiredError)):
		return Outcome{State: OutcomeExpired}, 0, nil
	case errors.As(err, new(*storage.ShortageError)):
		if known, failed := x.outcome(ctx, r, false); failed == nil && known.State != OutcomeNotApplied {
			return known, 0, nil
		}
	}
	return Outcome{State: OutcomeCancelled, Epoch: epoch, Identity: r.Identity}, epoch, err
}

package mvcc

import (
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
)

// RangeDelete asks for the deletion of every key in [Lower, Upper); a nil Upper means to the end.
type RangeDelete struct {
	Lower, Upper []byte
	Limit        int // delete at most this many keys, lowest first; 0: all
	Conditions   []Condition
	Durability   Durability
	Request      *Request                  // what makes it be applied at most once; its Result is not used
	Result       func(RangeDeleted) []byte // encodes the outcome for the record of the request
}

// RangeDeleted is the outcome. With Count zero nothing was written, and Epoch is the snapshot that
// was read.
type RangeDeleted struct {
	Epoch keys.Epoch
	Count int
	More  bool // the limit was reached and keys remain
}

// rangeDelete is what a session keeps for the next one.
type rangeDelete struct {
	write Write
	reads readSet
}

// rangeAttempts bounds how often a range delete starts again because the range changed under it.
const rangeAttempts = 16

// DeleteRange deletes the keys of a range atomically, as one commit. It reads the range at a snapshot and commits only if
// the range did not change until its own epoch; otherwise it starts again, and after some attempts gives up with
// *ConflictError. A range whose deletion exceeds the batch limits is a *LimitError: delete it in parts, with Limit.
func (x *Session) DeleteRange(ctx context.Context, o RangeDelete) (RangeDeleted, error) {
	var conflict *ConflictError
	for range rangeAttempts {
		out, err := x.deleteRangeOnce(ctx, o)
		if !errors.As(err, &conflict) {
			return out, x.orApplied(ctx, o.Request, err)
		}
	}
	return RangeDeleted{}, conflict
}

func (x *Session) deleteRangeOnce(ctx context.Context, o RangeDelete) (RangeDeleted, error) {
	w, reads := &x.buffers.ranged.write, &x.buffers.ranged.reads
	w.Reset()
	defer w.Reset() // a session that is pooled keeps nothing of the request
	w.Conditions, w.Durability = append(w.Conditions, o.Conditions...), o.Durability
	at, err := x.OpenSnapshot(0)
	if err != nil {
		return RangeDeleted{}, err
	}
	defer x.CloseSnapshot()
	out, err := x.collect(ctx, o, w)
	if err != nil {
		return out, err
	}
	if out.Count == 0 && len(w.Conditions) == 0 && o.Request == nil {
		out.Epoch = at
		return out, nil
	}
	reads.reset(at)
	reads.addRange(readRange(o, w, out.More))
	w.snapshot, w.reads, w.checkOnly = at, reads, out.Count == 0
	if o.Request != nil {
		o.Request.Result = func() []byte { return o.Result(out) }
		w.Identify(o.Request)
	}
	epoch, err := x.commit(ctx, w)
	if out.Epoch = epoch; w.checkOnly {
		out.Epoch = at
	}
	return out, err
}

// checkContextEvery is how many keys a commit reads between two checks of its context.
const checkContextEvery = 64

// collect fills w with a deletion for each key of the range at the snapshot.
func (x *Session) collect(ctx context.Context, o RangeDelete, w *Write) (out RangeDeleted, err error) {
	c, err := x.Scan(ScanOptions{Lower: o.Lower, Upper: o.Upper, KeysOnly: true, Context: ctx})
	if err != nil {
		return out, err
	}
	defer c.Close()
	defer func() { x.reveals(true, c.Await()) }() // however it ends: the error for too many keys reveals them, too
	admitted := w.Batch.MemoryBytes()
	for c.Next() {
		if o.Limit > 0 && out.Count == o.Limit {
			out.More = true
			break
		}
		if out.Count == x.store.options.Limits.BatchOps {
			return out, &LimitError{What: "batch operations", Limit: x.store.options.Limits.BatchOps, Got: out.Count + 1}
		}
		if out.Count%checkContextEvery == 0 && ctx.Err() != nil {
			return out, context.Cause(ctx)
		}
		w.Delete(c.Key())
		if size := w.Batch.PayloadBytes(); size > x.store.options.Limits.BatchBytes {
			return out, &LimitError{What: "batch bytes", Limit: x.store.options.Limits.BatchBytes, Got: size}
		}
		if admitted, err = x.admitMade(admitted, w.Batch.MemoryBytes()); err != nil {
			return out, err
		}
		out.Count++
	}
	return out, c.Err()
}

// readRange is the part of the range that was read: up to and including the last key when a limit ended it early.
func readRange(o RangeDelete, w *Write, more bool) (lower, upper []byte) {
	lower = keys.Append(nil, keys.SpaceUser, o.Lower)
	switch {
	case more:
		last := w.Batch.Key(w.Batch.Count() - 1)
		upper = append(append(upper, last...), 0)
	case o.Upper != nil:
		upper = keys.Append(nil, keys.SpaceUser, o.Upper)
	default:
		upper = []byte{byte(keys.SpaceUser) + 1}
	}
	return lower, upper
}

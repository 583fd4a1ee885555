package mvcc

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Execution is a transaction in one request: if all conditions hold, one list of operations is done, and otherwise the
// other one.
type Execution struct {
	// Write has the conditions on keys, the durability, and with Direct also the operations.
	Write  *Write
	Ranges []RangeCondition
	// Direct says that the operations for the case that all conditions hold are those in Write.
	Direct bool
	// Otherwise says that there are operations for the case that a condition does not hold.
	Otherwise bool
	// Operate does the operations of a case in the transaction. It may be called several times: each call starts anew.
	Operate func(ctx context.Context, t *Txn, holds bool) error
}

// RangeCondition is a condition on the keys in [Lower, Upper); a nil Upper means to the end.
type RangeCondition struct {
	Lower, Upper   []byte
	UnchangedSince keys.Epoch // not zero: no key was written or deleted after this epoch
	Empty          bool       // without UnchangedSince: whether the range must be empty, or must not be
}

// Executed is the outcome of an Execution.
type Executed struct {
	Holds       bool       // all conditions held
	Direct      bool       // no transaction was needed: nothing was done but the operations in Write, or nothing
	Epoch       keys.Epoch // zero if nothing was written
	Transaction bool       // a transaction was begun
}

const (
	executeAttempts = 32
	// executeAttemptsFree is how many attempts do not wait for a turn. From then on the losers of a client take turns, and after
	// executeAttemptsOfClient also those of all clients, see executeTurns.
	executeAttemptsFree     = 2
	executeAttemptsOfClient = 4
	// executeTurnMax is how long a turn lasts at most: one that takes long, because it reads much, goes on without it, and keeps no
	// others waiting, which may be about other keys.
	executeTurnMax = 100 * time.Millisecond
)

// Execute evaluates the conditions and does the operations of the case that they select, atomically.
//
// Conditions on keys and operations that only write are a plain write with preconditions: no snapshot, no validation, no
// retry. Everything else is a serializable transaction, which is tried again with a new snapshot when it conflicts.
//
// Errors: those of Operate, of Commit and of Txn.UnchangedSince. Await returns the epoch that the outcome reveals.
func (x *Session) Execute(ctx context.Context, e *Execution) (Executed, error) {
	if e.Direct && len(e.Ranges) == 0 {
		if out, done, err := x.executeDirect(ctx, e); done {
			return out, err
		}
	}
	out, err := x.executeTransaction(ctx, e)
	return out, x.orApplied(ctx, e.Write.request, err)
}

// executeDirect commits the plain write. It is not done if the other operations have to be, or if a key is written twice.
func (x *Session) executeDirect(ctx context.Context, e *Execution) (out Executed, done bool, err error) {
	epoch, err := x.Commit(ctx, e.Write)
	var failed *PreconditionError
	var twice *batch.DuplicateKeyError
	switch {
	case errors.As(err, &twice):
		return out, false, nil
	case errors.As(err, &failed):
		return out, !e.Otherwise, nil
	}
	return Executed{Holds: true, Direct: true, Epoch: epoch}, true, err
}

func (x *Session) executeTransaction(ctx context.Context, e *Execution) (Executed, error) {
	for attempt := 1; ; attempt++ {
		out, err := x.executeOnce(ctx, e)
		if !errors.As(err, new(*ConflictError)) || attempt == executeAttempts {
			return out, err
		}
		leave, err := x.store.turns.execute.enter(ctx, attempt)
		if err != nil {
			return out, err
		}
		defer leave() // of two attempts: see executeTurns
		if ctx.Err() != nil {
			return out, context.Cause(ctx)
		}
	}
}

func (x *Session) executeOnce(ctx context.Context, e *Execution) (Executed, error) {
	out := Executed{Transaction: true}
	t, err := x.Begin(TxnOptions{Durability: e.Write.Durability})
	if err != nil {
		return out, err
	}
	defer func() {
		x.await = max(x.await, t.Await()) // however it ends
		t.Rollback()
	}()
	if out.Holds, err = t.allHold(ctx, e); err != nil {
		return out, x.finish(ctx, err)
	}
	if err := e.Operate(ctx, t, out.Holds); err != nil {
		return out, err
	}
	at := t.At()
	if out.Epoch, err = t.CommitRequest(ctx, e.Write.request); out.Epoch == at {
		out.Epoch = 0
	}
	return out, err
}

// allHold evaluates the conditions in the transaction, so that what they read is validated when it commits.
func (t *Txn) allHold(ctx context.Context, e *Execution) (bool, error) {
	all := true
	for i := range e.Write.Conditions {
		if i%conditionsPerTurn == conditionsPerTurn-1 {
			letOthersRun()
		}
		holds, err := t.conditionHolds(&e.Write.Conditions[i])
		if err = cmp.Or(err, endOf(ctx)); err != nil {
			return false, err
		}
		all = all && holds
	}
	for i := range e.Ranges {
		holds, err := t.rangeHolds(ctx, &e.Ranges[i])
		if err = cmp.Or(err, endOf(ctx)); err != nil {
			return false, err
		}
		all = all && holds
	}
	return all, nil
}

// conditionHolds evaluates a condition at the transaction's snapshot. It reads no value but one that may be equal.
func (t *Txn) conditionHolds(c *Condition) (bool, error) {
	x := t.session
	if invariants.Enabled {
		x.assertRead(c.Key)
	}
	if err := x.store.checkKey(c.Key); err != nil && !x.hasBeyondLimit(c.Key) {
		return false, err
	}
	x.key = c.appendInternal(x.key[:0])
	x.slot.Enter()
	defer x.slot.Leave()
	v, ok, err := x.reader.Get(x.key, t.at)
	if err != nil {
		return false, err
	}
	holds, err := x.conditionHolds(c, v, ok)
	if err != nil {
		return false, ofKey(err, x.key)
	}
	t.await = max(t.await, x.store.mustAwait(v.Sync, v.Epoch))
	if t.validated() {
		t.reads.addPoint(x.key)
	}
	return holds, t.checkSize()
}

func (t *Txn) rangeHolds(ctx context.Context, r *RangeCondition) (bool, error) {
	if r.UnchangedSince != 0 {
		return t.UnchangedSince(r.Lower, r.Upper, r.UnchangedSince)
	}
	c, err := t.Scan(ScanOptions{Lower: r.Lower, Upper: r.Upper, KeysOnly: true, Context: ctx})
	if err != nil {
		return false, err
	}
	defer c.Close()
	return c.Next() != r.Empty, c.Err()
}

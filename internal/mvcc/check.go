package mvcc

import (
	"bytes"
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// Await is the newest epoch that must be durable before the client may learn the outcomes of the
// session's calls since the last Await. That holds for answers and errors: a refused precondition,
// a conflict, or a value of the wrong type reveals a commit as much as reading it does. It is zero
// if there is none. It covers Commit, InvokeAll, DeleteRange and Txn.Commit; reads return the epoch
// that they reveal with their result.
func (x *Session) Await() keys.Epoch {
	e := x.await
	x.await = 0
	return e
}

// reveals notes that the outcome of the current call shows a version, or that the version does not
// exist. An outcome without a commit is returned once the version is visible; see finish.
func (x *Session) reveals(sync bool, e keys.Epoch) {
	x.await = max(x.await, x.store.mustAwait(sync, e))
	x.committing.revealed = max(x.committing.revealed, e)
}

// checkFirst lets the first committer win: no key of the write set may have a version newer than
// the snapshot. It reads straight from memtables and tree, not through visible. The error is
// returned once the snapshot of a retry would see that version. It calls pause after every few keys.
func (x *Session) checkFirst(w *Write, pause func() error) error {
	for i := range w.Batch.Count() {
		if i%checkContextEvery == checkContextEvery-1 {
			if err := pause(); err != nil {
				return err
			}
		}
		key := w.Batch.Key(i)
		if keys.SpaceOf(key) == keys.SpaceSystem {
			continue // a record changes with the key that it belongs to, or is of one request alone
		}
		if err := x.notNewer(&x.buffers.txn.reads, key, w.snapshot); err != nil {
			return err
		}
	}
	return nil
}

// orConflict replaces a refusal of a transaction by a conflict, if there is one: of a key that was attached to a lease when the
// transaction read it, the lease may have ended with the key.
func (x *Session) orConflict(ctx context.Context, w *Write, err error) error {
	if !w.firstWins || x.store.latches.newest(&x.committing.held) <= w.snapshot {
		return err
	}
	x.slot.Enter()
	defer x.slot.Leave()
	if conflict := x.checkFirst(w, func() error { return endOf(ctx) }); errors.As(conflict, new(*ConflictError)) {
		return conflict
	}
	return err
}

// checkConditions tests the preconditions against the newest versions, straight from memtables and
// tree and not through visible: the latches keep these versions the newest. A failure is returned
// only once the version that it reveals is visible. Whether a condition holds or not reveals the
// version (Await).
func (x *Session) checkConditions(ctx context.Context, w *Write) error {
	for i := range w.Conditions {
		if i > 0 && i%checkContextEvery == 0 && ctx.Err() != nil {
			return context.Cause(ctx) // it holds latches, and each condition may read a page
		}
		c := &w.Conditions[i]
		if invariants.Enabled {
			x.assertRead(c.Key)
		}
		x.key = c.appendInternal(x.key[:0])
		x.slot.Enter()
		if x.stillHolds(c) {
			x.slot.Leave()
			continue
		}
		v, ok, err := x.reader.Newest(x.key)
		holds := false
		if err == nil {
			holds, err = x.conditionHolds(c, v, ok)
		}
		epoch := v.Epoch
		var failed *PreconditionError
		if err == nil && !holds {
			failed, err = x.failure(c, v, ok)
		}
		x.reveals(v.Sync, epoch)
		x.slot.Leave()
		if err != nil {
			return err
		}
		if holds {
			continue
		}
		x.store.counters.preconditions.Add(1)
		failed.Index = i
		return failed
	}
	return nil
}

// stillHolds reports whether a condition was found to hold before the latches were taken, and its key, which x.key is, has no newer version:
// its page may have been evicted, and many would be read one after the other.
func (x *Session) stillHolds(c *Condition) bool {
	return c.held != 0 && x.unchangedSince(c.held)
}

// unchangedSince reports whether the key in x.key, whose latch is held, has no version after a snapshot that is open.
func (x *Session) unchangedSince(at keys.Epoch) bool {
	l := x.store.latches
	if l.table[l.stripe(x.key)].newest <= at {
		return true
	}
	newer, err := x.reader.NewestSince(x.key, at)
	return newer == 0 && err == nil
}

// CurrentValueBytesMax bounds the value in a PreconditionError. The error reaches clients in trailers, and many clients of gRPC
// accept 8 KiB of them: twice the base64 of a key of 2 KiB and of this value leaves room for the rest.
const CurrentValueBytesMax = 1 << 10

// failure describes a condition that does not hold. The slot is entered.
func (x *Session) failure(c *Condition, v storage.Version, ok bool) (failed *PreconditionError, err error) {
	failed = &PreconditionError{Condition: *c, Found: ok && v.Kind.HasValue(), Epoch: v.Epoch}
	if c.ReturnCurrent && failed.Found && c.Kind != LockHeld {
		if failed.ValueSize = v.Size(); failed.ValueSize <= CurrentValueBytesMax {
			failed.Value, err = x.reader.AppendValue(make([]byte, 0, failed.ValueSize), v)
		}
	}
	return failed, err
}

func (x *Session) conditionHolds(c *Condition, v storage.Version, ok bool) (bool, error) {
	exists := ok && v.Kind.HasValue()
	switch c.Kind {
	case KeyAbsent:
		return !exists, nil
	case KeyPresent:
		return exists, nil
	case EpochEquals, LockHeld:
		return exists && v.Epoch == c.Epoch, nil
	}
	if !exists || v.Size() != len(c.Value) { // one of another length is not read: nothing counts it
		return false, nil
	}
	var err error
	x.committing.writer.Scratch, err = x.reader.AppendValue(x.committing.writer.Scratch[:0], v)
	return bytes.Equal(x.committing.writer.Scratch, c.Value), err
}

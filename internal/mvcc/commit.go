package mvcc

import (
	"bytes"
	"context"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Write is one commit: its operations, what must hold for it, and when it counts as done. It is reused with Reset.
type Write struct {
	Batch      batch.Builder
	Conditions []Condition
	Durability Durability

	reads     *readSet // what a validated commit read; nil for a blind one
	firstWins bool     // a key that changed after the snapshot is a conflict
}

// Reset empties the write and keeps its buffers.
func (w *Write) Reset() {
	w.Batch.Reset()
	w.Conditions = w.Conditions[:0]
	w.Durability = DurabilityDefault
	w.reads, w.firstWins = nil, false
}

// Set adds "key becomes value" to the commit.
func (w *Write) Set(key, value []byte) { w.Batch.Set(keys.SpaceUser, key, value) }

// Delete adds "key is deleted" to the commit.
func (w *Write) Delete(key []byte) { w.Batch.Delete(keys.SpaceUser, key) }

// Commit logs and installs w under one epoch and returns it. The commit may be acknowledged after Store.Wait.
//
// Errors change nothing: *LimitError, ErrEmptyKey, ErrEmptyBatch, *batch.DuplicateKeyError for bad input,
// *PreconditionError, *ConflictError, ErrMemoryFull, vfs.ErrNoSpace, ErrFailed, ErrClosed, and why the context ended. Once the epoch is
// reserved the context ends nothing but waits: a commit that returns an epoch has happened.
func (x *Session) Commit(ctx context.Context, w *Write) (keys.Epoch, error) {
	epoch, err := x.commitAt(ctx, w, 0)
	x.pay(ctx, w, err)
	return epoch, err
}

// Await is the newest epoch that must be durable before the outcomes of the session's calls since the last Await may be told, answers and
// errors alike: a refused precondition, a conflict, or a value of the wrong type reveals a commit as much as reading it does. Zero if there
// is none. It is of Commit, InvokeAll, DeleteRange and Txn.Commit; what reads reveal is told beside what they return.
func (x *Session) Await() keys.Epoch {
	e := x.await
	x.await = 0
	return e
}

// reveals notes that the outcome of the call at hand shows a version, or that it is missing.
func (x *Session) reveals(sync bool, e keys.Epoch) {
	x.await = max(x.await, x.store.mustAwait(sync, e))
}

// pay slows a writer down for what it wrote, while checkpoints fall behind. It holds nothing meanwhile: a snapshot would keep versions that
// checkpoints could drop.
func (x *Session) pay(ctx context.Context, w *Write, err error) {
	if err == nil {
		x.store.engine.Throttle(ctx, &x.writer, w.Batch.Count(), w.Batch.Size())
	}
}

// commitAt is Commit for a transaction with a snapshot. Its caller pays.
func (x *Session) commitAt(ctx context.Context, w *Write, at keys.Epoch) (keys.Epoch, error) {
	body, err := x.prepare(w)
	if err != nil {
		return 0, err
	}
	s := x.store
	if s.horizonRule == HorizonScanned {
		x.rescan()
	}
	if err := x.awaitPrevious(ctx, at); err != nil {
		return 0, err
	}
	x.latch(w)
	if err := x.lock(ctx); err != nil {
		return 0, err
	}
	epoch, err := x.commitLatched(ctx, w, body, at)
	x.unlock()
	return epoch, x.finish(ctx, err)
}

// prepare checks w against the limits and sorts its operations.
func (x *Session) prepare(w *Write) ([]byte, error) {
	s := x.store
	if s.closing.Load() {
		return nil, ErrClosed
	}
	if err := s.engine.Err(); err != nil {
		return nil, err
	}
	n := w.Batch.Count()
	if n == 0 {
		return nil, ErrEmptyBatch
	}
	if err := s.admit(w); err != nil {
		return nil, err
	}
	if n > s.limits.BatchOps {
		return nil, &LimitError{What: "batch operations", Limit: s.limits.BatchOps, Got: n}
	}
	if size := w.Batch.PayloadBytes(); size > s.limits.BatchBytes {
		return nil, &LimitError{What: "batch bytes", Limit: s.limits.BatchBytes, Got: size}
	}
	for i := range n {
		key := keys.User(w.Batch.Key(i))
		if err := s.checkKey(key); err != nil && !(w.Batch.Deletes(i) && x.hasBeyondLimit(key)) {
			return nil, err
		}
	}
	if v := w.Batch.ValueBytesMax(); v > s.limits.ValueBytes {
		return nil, &LimitError{What: "value bytes", Limit: s.limits.ValueBytes, Got: v}
	}
	for i := range w.Conditions {
		if err := s.checkKey(w.Conditions[i].Key); err != nil && !x.hasBeyondLimit(w.Conditions[i].Key) {
			return nil, err
		}
	}
	return w.Batch.Finish()
}

// awaitPrevious bounds the epochs beyond visible to one per session; see horizon. The snapshot of the commit, if it has one, has been
// visible.
func (x *Session) awaitPrevious(ctx context.Context, at keys.Epoch) error {
	if x.previous > at && x.previous > x.store.Visible() {
		return x.store.horizon.wait(ctx, x.previous, x.parker)
	}
	return nil
}

// latch collects the stripes of everything that w writes or tests.
func (x *Session) latch(w *Write) {
	x.held.reset()
	if x.store.serial {
		return // one mutex stands for all of them
	}
	for i := range w.Batch.Count() {
		x.held.add(x.store.latches, w.Batch.Key(i))
	}
	for i := range w.Conditions {
		x.key = keys.Append(x.key[:0], keys.SpaceUser, w.Conditions[i].Key)
		x.held.add(x.store.latches, x.key)
	}
}

// commitLatched is steps 2 to 6 of the protocol, under the latches of the write set. When they are given back, finish has the rest to do.
// An epoch that is reserved is always finished, whatever the context says: with the commit, or without one if it may not happen.
func (x *Session) commitLatched(ctx context.Context, w *Write, body []byte, at keys.Epoch) (keys.Epoch, error) {
	x.reached(stepLatched)
	x.slot.Enter()
	epoch, err := x.check(ctx, w, body, at)
	if err != nil {
		x.slot.Leave()
		return 0, err
	}
	// From here to done: no allocation, no lock, no log line. Whoever is held up here holds up every later commit.
	x.reached(stepReserved)
	var refused error
	if w.reads != nil {
		refused = x.validateSince(ctx, w.reads, epoch)
	}
	if refused == nil {
		x.store.engine.Record(&x.writer, body)
		x.reached(stepCopied)
		if err := x.store.engine.Install(&x.writer, body, x.store.isSync(w.Durability)); err != nil {
			x.slot.Leave()
			x.store.horizon.fail(err) // Wait tells it: the commit has its record, and may be there after a restart
			x.previous = epoch
			return epoch, nil
		}
	} else {
		x.store.engine.NoOp(&x.writer)
		x.store.voids.Add(1)
	}
	x.reached(stepInserted)
	x.store.horizon.done(epoch)
	x.reached(stepMarked)
	x.previous = epoch
	if refused != nil {
		x.slot.Leave()
		if w.reads.refused(refused) {
			x.store.conflicts.Add(1)
			x.told = epoch
		}
		return 0, refused
	}
	if x.writer.MadeLongChain() {
		x.crowded = true // and inside the slot's protection, for finish
	} else {
		x.slot.Leave()
	}
	return epoch, nil
}

// finish does what nobody else has to wait for, so it comes when the latches have been given back. An error is told only when visible has
// reached what it reveals, and with it a retry's snapshot; and long version chains are pruned.
func (x *Session) finish(ctx context.Context, err error) error {
	x.reached(stepReleased)
	if x.told != 0 {
		told := x.told
		x.told = 0
		if ended := x.store.horizon.wait(ctx, told, x.parker); ended != nil {
			err = ended // and not what it would reveal
		}
	}
	if x.crowded {
		x.crowded = false
		length := x.prune()
		x.slot.Leave()
		x.store.collector.help(length)
	}
	return err
}

// check is steps 2 and 3: it returns the reserved epoch, inside the slot's protection as it came.
func (x *Session) check(ctx context.Context, w *Write, body []byte, at keys.Epoch) (keys.Epoch, error) {
	if len(w.Conditions) > 0 {
		if err := x.checkConditions(ctx, w); err != nil {
			return 0, err
		}
	}
	if w.firstWins && (x.store.serial || x.store.latches.newest(&x.held) > at) {
		if err := x.checkFirst(w, at); err != nil {
			return 0, err
		}
	}
	epoch, err := x.reserve(ctx, w, body)
	if err == nil && !x.store.serial {
		x.store.latches.wrote(&x.held, epoch)
	}
	return epoch, err
}

// checkFirst lets the first committer win: no key of the write set may have a version newer than the snapshot. It reads
// straight from memtables and tree, not through visible. The error is told once a retry's snapshot would see that version.
func (x *Session) checkFirst(w *Write, at keys.Epoch) error {
	for i := range w.Batch.Count() {
		key := w.Batch.Key(i)
		newest, err := x.reader.NewestSince(key, at)
		if err != nil {
			return err
		}
		if newest != 0 {
			x.store.conflicts.Add(1)
			x.told = newest
			v, _, err := x.reader.Newest(key) // the latches keep it the same
			if err != nil {
				return err
			}
			x.reveals(v.Sync, v.Epoch)
			return x.txn.reads.conflict(key, newest)
		}
	}
	return nil
}

// reserve validates what w read and claims an epoch, all inside the slot's protection, so that the memtables that validation saw
// stay. The slow path, in which the log and the memtable rotate or memory has to be waited for, runs outside it, so that what it
// waits for can be reclaimed; after it, validation starts anew.
func (x *Session) reserve(ctx context.Context, w *Write, body []byte) (keys.Epoch, error) {
	for {
		epoch, err := x.validateAndReserve(ctx, w, body)
		if err != storage.ErrRotating { //nolint:errorlint // a bare sentinel on the hot path
			return epoch, err
		}
		x.slot.Leave()
		if err := x.store.admitMore(ctx, w); err != nil { // the disk may have become full since prepare
			x.slot.Enter()
			return 0, err
		}
		claimed, err := x.store.engine.AdvanceGeneration(ctx, &x.writer, body)
		x.slot.Enter() // an epoch that is claimed and not done has protected its memtable so far
		if err != nil {
			return 0, err
		}
		if claimed {
			if w.reads != nil {
				w.reads.seen = storage.Validation{} // see validateSince
			}
			return x.writer.Epoch(), nil
		}
	}
}

func (x *Session) validateAndReserve(ctx context.Context, w *Write, body []byte) (keys.Epoch, error) {
	if w.reads != nil {
		if err := x.validate(ctx, w.reads); err != nil {
			return 0, err
		}
		x.reached(stepChecked)
		return x.store.engine.ReserveValidated(&w.reads.seen, &x.writer, body)
	}
	x.reached(stepChecked)
	return x.store.engine.Reserve(&x.writer, body)
}

// checkConditions tests the preconditions against the newest versions, straight from memtables and tree and not through
// visible: the latches keep them still. A failure is told only once what it reveals is visible. Whether a condition holds or not reveals
// the version (Await).
func (x *Session) checkConditions(ctx context.Context, w *Write) error {
	for i := range w.Conditions {
		if i > 0 && i%checkContextEvery == 0 && ctx.Err() != nil {
			return context.Cause(ctx) // it holds latches, and each condition may read a page
		}
		c := &w.Conditions[i]
		x.key = keys.Append(x.key[:0], keys.SpaceUser, c.Key)
		x.slot.Enter()
		v, ok, err := x.reader.Newest(x.key)
		holds := false
		if err == nil {
			holds, err = x.holds(c, v, ok)
		}
		epoch := v.Epoch
		x.reveals(v.Sync, epoch)
		x.slot.Leave()
		if err != nil {
			return err
		}
		if holds {
			continue
		}
		x.told = epoch
		x.store.preconditions.Add(1)
		return &PreconditionError{Index: i, Condition: *c, Found: ok && v.Kind == keys.KindSet, Epoch: epoch}
	}
	return nil
}

func (x *Session) holds(c *Condition, v storage.Version, ok bool) (bool, error) {
	exists := ok && v.Kind == keys.KindSet
	switch c.Kind {
	case KeyAbsent:
		return !exists, nil
	case KeyPresent:
		return exists, nil
	case EpochEquals:
		return exists && v.Epoch == c.Epoch, nil
	}
	if !exists {
		return false, nil
	}
	var err error
	x.writer.Scratch, err = x.reader.AppendValue(x.writer.Scratch[:0], v)
	return bytes.Equal(x.writer.Scratch, c.Value), err
}

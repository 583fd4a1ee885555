package mvcc

import (
	"cmp"
	"context"
	"errors"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// commitState is what a session needs to commit, and what it remembers of its commits.
type commitState struct {
	writer        storage.Writer
	held          latchSet
	previous      keys.Epoch       // newest epoch this session reserved; see awaitTurn
	revealed      keys.Epoch       // what must be visible before the current outcome is returned; see finish
	memory        time.Duration    // waited for memory, a segment or the throttle, since TakeWaits
	madeLongChain bool             // the current commit has made long chains; see finish
	small         int              // bytes of the current commit that are not admitted yet; see admitSmall
	turn          func()           // ends the turn of the current commit; nil: it has none
	writing       atomic.Bool      // of assertAlone
	atStep        func(commitStep) // of tests
}

// Write is one commit: its operations, what must hold for it, and when it counts as done. It is reused with Reset.
type Write struct {
	Batch      batch.Builder
	Conditions []Condition
	Durability Durability
	Origin     batch.Origin // what makes the commit; a client

	snapshot  keys.Epoch  // at which the write was computed, or a later one up to which its keys have not changed; zero for a plain write
	reads     *readSet    // what a validated commit read; nil for others
	firstWins bool        // a key that changed after the snapshot is a conflict
	checkOnly bool        // the batch is empty: conditions and reads are checked, and nothing is written
	ops       []Invoke    // of InvokeAll: the batch is computed from them while the latches are held
	outcomes  []Invoked   // of ops
	body      *batch.Body // the batch as prepare left it

	request   *Request // that the commit answers; nil if it has no id
	fence     bool     // the commit says that the request is cancelled; it is own, too
	own       bool     // the commit is the store's own: a batch of records alone is not empty
	recordKey []byte   // buffers of Identify
	record    []byte

	derived derivation // what the commit computes while it holds its latches

	load *storage.BulkLoad // what a commit that publishes a bulk load publishes; its batch is empty
}

// Reset empties the write and keeps its buffers.
func (w *Write) Reset() {
	w.Batch.Reset()
	clear(w.Conditions) // they refer to memory of the request
	w.Conditions = w.Conditions[:0]
	w.Durability, w.Origin = DurabilityDefault, batch.OriginClient
	w.snapshot, w.reads, w.firstWins, w.checkOnly = 0, nil, false, false
	w.ops, w.outcomes, w.body, w.load = nil, nil, nil, nil
	w.request, w.fence, w.own = nil, false, false
	w.derived.reset()
}

// MemoryBytes is about how much memory the write keeps for the next one.
func (w *Write) MemoryBytes() int {
	return w.Batch.MemoryBytes() + cap(w.Conditions)*int(unsafe.Sizeof(Condition{}))
}

// Set adds "key becomes value" to the commit.
func (w *Write) Set(key, value []byte) { w.Batch.Set(keys.SpaceUser, key, value) }

// SetShared is Set without a copy of a long value, which must not change until the commit has returned. The commit
// releases it, however it ends: the write cannot be committed again, but with Reset.
func (w *Write) SetShared(key, value []byte) { w.Batch.SetShared(keys.SpaceUser, key, value) }

// Delete adds "key is deleted" to the commit.
func (w *Write) Delete(key []byte) { w.Batch.Delete(keys.SpaceUser, key) }

// Commit logs and installs w under one epoch and returns it. The commit may be acknowledged after Store.Wait.
//
// The session may commit again before that, and wait once for its newest epoch: its commits become visible in their
// order. Conditions see its earlier commits, as they see all that are installed; a snapshot sees them after Store.Wait.
//
// Errors change nothing, but for *AppliedError: the request was executed before. *LimitError, ErrEmptyKey, ErrEmptyBatch, *batch.DuplicateKeyError for bad input,
// *PreconditionError, *ConflictError, ErrMemoryFull, vfs.ErrNoSpace, ErrFailed, ErrClosed, and why the context
// ended. Once the epoch is reserved the context ends nothing but waits: a commit that returns an epoch has happened.
func (x *Session) Commit(ctx context.Context, w *Write) (keys.Epoch, error) {
	epoch, err := x.commit(ctx, w)
	w.Batch.ReleaseShared()
	return epoch, err
}

// commitDurably is Commit of a SYNC write that is durable when it returns. With an epoch and an error, that is not known: the error is
// that of WaitWritten.
func (x *Session) commitDurably(ctx context.Context, w *Write) (keys.Epoch, error) {
	epoch, err := x.Commit(ctx, w)
	if err != nil {
		return epoch, err
	}
	return epoch, x.store.WaitWritten(ctx, epoch, DurabilitySync)
}

// commit is tryCommit. An error tells of what others have written, perhaps after the permission has ended: a conflict names a key and an epoch. So the
// permission is asked once more. What has happened is told nevertheless: that the request was executed before, or what became of a bulk load.
func (x *Session) commit(ctx context.Context, w *Write) (keys.Epoch, error) {
	epoch, err := x.tryCommit(ctx, w)
	x.LeaveTurn()
	if err == nil || w.load != nil || errors.As(err, new(*AppliedError)) || errors.As(err, new(*NotPermittedError)) {
		return epoch, err
	}
	return 0, cmp.Or(x.permitted(), err)
}

// tryCommit is the commit protocol; docs/architecture.md ("A write") describes it step by step. Every write takes it:
// plain writes, InvokeAll, DeleteRange, transactions, and the publication of a bulk load. They differ in what they
// check, and in whether the operations are computed while the latches are held. A bulk load takes all latches, and its
// versions are installed with a tree instead of a record.
//
// It returns epoch zero, and no error, if there was nothing to write.
func (x *Session) tryCommit(ctx context.Context, w *Write) (keys.Epoch, error) {
	if w.request != nil {
		x.expectRecord(w.request)
	}
	if w.reads == nil && !w.firstWins { // which would leave the turn to validate
		if err := x.turnOf(ctx, w); err != nil {
			return 0, err
		}
	}
	if err := x.prepare(w); err != nil {
		return 0, err
	}
	if err := x.awaitTurn(ctx); err != nil {
		return 0, err
	}
	opened, err := x.readBefore(ctx, w)
	if opened {
		defer x.CloseSnapshot()
	}
	if err == nil {
		err = x.lockReady(ctx, w)
	}
	if err != nil {
		return 0, x.orApplied(ctx, w.request, x.finish(ctx, err))
	}
	if invariants.Enabled {
		x.assertAlone(true)
	}
	epoch, err := x.commitLatched(ctx, w)
	if invariants.Enabled {
		x.assertAlone(false)
	}
	x.unlock()
	x.LeaveTurn()
	if w.derived.under != nil {
		w.derived.released = time.Now()
	}
	if err = x.finish(ctx, err); err != nil {
		return 0, err
	}
	x.throttle(ctx, w, epoch)
	return epoch, nil
}

// commitLatched is the part of the protocol that the latches protect: from the checks to the installed versions.
// A reserved epoch is always completed, whatever the context says.
func (x *Session) commitLatched(ctx context.Context, w *Write) (keys.Epoch, error) {
	x.reached(stepLatched)
	if err := x.permitted(); err != nil {
		return 0, err
	}
	if w.request != nil {
		if err := x.checkRequest(w); err != nil {
			return 0, err
		}
	}
	if err := x.checkConditions(ctx, w); err != nil {
		return 0, err
	}
	if err := x.compute(ctx, w); err != nil {
		return 0, x.orConflict(ctx, w, err)
	}
	if w.load != nil {
		return x.publishBulkLoad(ctx, w.load)
	}
	if w.request != nil {
		x.store.requests.note(&w.request.ID)
	}
	x.slot.Enter()
	epoch, err := x.reserve(ctx, w)
	if epoch == 0 {
		x.slot.Leave()
		return 0, err
	}
	if err := x.complete(ctx, w, epoch); err != nil {
		x.slot.Leave()
		return 0, err
	}
	if x.committing.writer.MadeLongChain() {
		x.committing.madeLongChain = true // finish prunes, inside the same guard
		return epoch, nil
	}
	x.slot.Leave()
	return epoch, nil
}

// complete turns a reserved epoch into the commit, or into a no-op record if the commit must not happen.
//
// From here until the epoch is marked as installed there is no allocation, no lock and no log line, unless the permission has
// changed since the latches were taken: every later commit waits for this one to become visible.
func (x *Session) complete(ctx context.Context, w *Write, epoch keys.Epoch) error {
	x.reached(stepReserved)
	x.committing.previous, x.committing.revealed = epoch, 0 // what was seen so far is older, and visible when epoch is
	refused := x.permitted()
	if refused == nil && w.reads != nil {
		refused = x.validateWindow(ctx, w.reads, epoch)
	}
	if refused == nil {
		if invariants.Enabled {
			x.assertLatched(w, epoch)
			x.assertWritten(w)
		}
		if w.request != nil {
			x.store.requests.count(w.record)
		}
		x.store.engine.Stamp(&x.committing.writer, w.body, x.store.clock.Latest()) // prepare has called Now
		x.store.engine.Record(&x.committing.writer, w.body)
		x.reached(stepCopied)
		if err := x.store.engine.Install(&x.committing.writer, w.body, x.store.isSync(w.Durability)); err != nil {
			x.store.watermark.fail(err) // Wait returns it: the commit has its record, and may exist after a restart
			return nil
		}
	} else {
		x.store.engine.NoOp(&x.committing.writer)
		x.store.counters.noOps.Add(1)
	}
	x.reached(stepInserted)
	x.store.watermark.markInstalled(epoch)
	x.reached(stepInstalled)
	x.store.engine.GiveBack(&x.committing.writer)
	if w.derived.soonest != 0 {
		x.store.expirer.note(w.derived.soonest)
	}
	return refused
}

// finish runs after the latches are released, so that other writers do not wait for it. An error, or the outcome of
// operations that write nothing, is returned only when visible has reached the epoch that it reveals: the snapshot of a
// retry, and of every reader that begins after the answer, includes it. Long version chains that the commit has made are
// pruned.
func (x *Session) finish(ctx context.Context, err error) error {
	x.reached(stepReleased)
	if x.committing.revealed != 0 {
		revealed := x.committing.revealed
		x.committing.revealed = 0
		if ended := x.store.watermark.wait(ctx, revealed, x.parker); ended != nil {
			err = ended // instead of the outcome that would reveal that epoch
		}
	}
	if x.committing.madeLongChain {
		x.committing.madeLongChain = false
		length := x.prune()
		x.slot.Leave()
		x.store.collector.assist(length)
	}
	return err
}

// ends reports whether the commit ends what clients have left: keys after their deadlines, leases, or records that nothing needs any more.
func (w *Write) ends() bool {
	return w.Origin == batch.OriginExpiry || w.Origin == batch.OriginLease || w.Origin == batch.OriginCleanup
}

// throttle delays the writer in proportion to what it wrote, while checkpoints are lagging. The snapshot of the
// write, if it has one, ends before, because it would keep versions that checkpoints could drop.
func (x *Session) throttle(ctx context.Context, w *Write, epoch keys.Epoch) {
	if epoch == 0 || w.load != nil {
		return
	}
	if w.snapshot != 0 {
		x.CloseSnapshot()
	}
	x.committing.writer.Ends = w.ends()
	x.committing.memory += x.store.engine.Throttle(ctx, &x.committing.writer, w.Batch.Count(), w.Batch.Size())
}

// prepare checks w against the limits and sorts its operations.
func (x *Session) prepare(w *Write) (err error) {
	s := x.store
	if s.lifecycle.closing.Load() {
		return ErrClosed
	}
	if err := s.engine.Err(); err != nil {
		return err
	}
	if w.load != nil {
		return nil
	}
	if w.Batch.Operations() == 0 && !w.checkOnly && !w.own {
		return ErrEmptyBatch
	}
	if err := s.admit(w); err != nil {
		return err
	}
	if err := x.checkLimits(w); err != nil {
		return err
	}
	if s.FeatureLevel() >= keys.FeatureLevelHistory {
		w.Batch.SetHeader(batch.Header{Time: s.clock.Now(), Origin: w.Origin}) // complete stamps the final time
	}
	w.body, err = w.Batch.Finish()
	return err
}

// checkLimits compares w with the limits. Those of batches and values are for clients: a commit of the store's own, which may delete
// keys of many clients, has bounds of its own.
func (x *Session) checkLimits(w *Write) error {
	limits := &x.store.options.Limits
	if n := w.countedOperations(limits.BatchOps); !w.own && n > limits.BatchOps {
		return &LimitError{What: "batch operations", Limit: limits.BatchOps, Got: n, Records: n - w.Batch.Operations()}
	}
	if size := w.Batch.PayloadBytes(); size > limits.BatchBytes && !w.own {
		return &LimitError{What: "batch bytes", Limit: limits.BatchBytes, Got: size}
	}
	for i := range w.Batch.Count() {
		if keys.SpaceOf(w.Batch.Key(i)) != keys.SpaceUser {
			continue // a record of the store
		}
		key := keys.User(w.Batch.Key(i))
		if w.Batch.WithMetadata() > 0 && w.Batch.HasMetadata(i) {
			if err := x.store.checkMetadata(key); err != nil {
				return err
			}
		}
		if err := x.store.checkKey(key); err != nil && !(w.Batch.Deletes(i) && x.hasBeyondLimit(key)) {
			return err
		}
	}
	if v := w.Batch.ValueBytesMax(); v > limits.ValueBytes && !w.own {
		return &LimitError{What: "value bytes", Limit: limits.ValueBytes, Got: v}
	}
	for i := range w.Conditions {
		if err := x.store.checkKey(w.Conditions[i].Key); err != nil && !x.hasBeyondLimit(w.Conditions[i].Key) {
			return err
		}
	}
	return nil
}

// epochsAheadMax is how far the newest epoch of a session may be after visible when the session reserves the next one.
// With 0, a writer waits whenever a neighbour is inside its insertion, which takes 500 ns.
const epochsAheadMax = 16

// awaitTurn waits until the session's previous epoch is at most epochsAheadMax after visible, which bounds the epochs
// after visible (see watermark).
func (x *Session) awaitTurn(ctx context.Context) error {
	s := x.store
	x.baseline.refresh(x)
	if previous := x.committing.previous; previous > s.Visible()+epochsAheadMax {
		return s.watermark.wait(ctx, previous-epochsAheadMax, x.parker)
	}
	return nil
}

// lock takes the latches of every key that w writes, tests or names with Latch, or none of them if the context ends first.
func (x *Session) lock(ctx context.Context, w *Write) error {
	x.committing.held.reset()
	if w.load != nil {
		x.committing.held.addAll()
	}
	for i := range w.Batch.Count() {
		x.committing.held.add(x.store.latches, latchKey(w.Batch.Key(i)))
	}
	from := 0
	for _, end := range w.derived.ends {
		x.committing.held.add(x.store.latches, w.derived.latches[from:end])
		from = end
	}
	for i := range w.Conditions {
		x.key = w.Conditions[i].appendInternal(x.key[:0])
		x.committing.held.add(x.store.latches, x.key)
	}
	if err := x.latchLeases(w); err != nil {
		return err
	}
	return x.store.latches.lock(ctx, &x.committing.held, x.parker)
}

// unlock releases what lock took.
func (x *Session) unlock() {
	x.store.latches.unlock(&x.committing.held)
}

// reserve makes the last checks and reserves the commit's epoch and its offset in the log. Epoch zero without an error
// means that there is nothing to write.
//
// Validation and reservation share one guard, so that the memtables that validation has seen stay. The slow path, in
// which the log and the memtable rotate or the writer waits for memory, runs outside the guard, so that the memory
// that it waits for can be reclaimed; validation then starts again.
func (x *Session) reserve(ctx context.Context, w *Write) (keys.Epoch, error) {
	if w.firstWins && x.store.latches.newest(&x.committing.held) > w.snapshot {
		if err := x.checkFirst(w, func() error { return endOf(ctx) }); err != nil {
			return 0, err
		}
	}
	epoch, err := x.validateAndReserve(ctx, w)
	if err == storage.ErrRotating { //nolint:errorlint // a bare sentinel on the hot path
		epoch, err = x.rotateUntilReserved(ctx, w)
	}
	if epoch != 0 {
		x.store.latches.wrote(&x.committing.held, epoch)
	}
	return epoch, err
}

func (x *Session) validateAndReserve(ctx context.Context, w *Write) (keys.Epoch, error) {
	switch {
	case w.checkOnly && w.reads == nil:
		return 0, nil
	case w.checkOnly:
		return 0, x.validateHere(ctx, w.reads)
	case w.Batch.Operations() == 0 && (!w.own || w.Batch.Count() == 0): // no operation of an InvokeAll applies
		return 0, nil
	case w.reads == nil:
		x.reached(stepChecked)
		return x.store.engine.Reserve(&x.committing.writer, w.body)
	}
	if err := x.validate(ctx, w.reads); err != nil {
		return 0, err
	}
	x.reached(stepChecked)
	return x.store.engine.ReserveValidated(&w.reads.validation, &x.committing.writer, w.body)
}

// revalidateMax bounds the time in which a large record gets no epoch while a merge takes what was committed since its validation, because it holds
// latches. After that the window reads pages, see unchanged.
const revalidateMax = 2 * time.Second

func (x *Session) rotateUntilReserved(ctx context.Context, w *Write) (epoch keys.Epoch, err error) {
	began := time.Now()
	for err = storage.ErrRotating; err == storage.ErrRotating; { //nolint:errorlint // see reserve
		validated := keys.MaxEpoch
		if w.reads != nil && time.Since(began) < revalidateMax {
			validated = w.reads.checked
		}
		if epoch, err = x.rotateAndReserve(ctx, w, validated); epoch == 0 && err == nil {
			epoch, err = x.validateAndReserve(ctx, w)
		}
	}
	return epoch, err
}

// rotateAndReserve waits for the next generation. Only a record that takes more than half of a segment gets its epoch
// here; for others, and for one whose validation has to look at the tree again, it returns zero, and they try again.
func (x *Session) rotateAndReserve(ctx context.Context, w *Write, validated keys.Epoch) (keys.Epoch, error) {
	x.slot.Leave()
	x.LeaveTurn()
	start := time.Now()
	err := x.store.awaitSpace(ctx, &x.committing.writer, w) // the disk may have become full since prepare
	reserved := false
	if err == nil {
		reserved, err = x.store.engine.AdvanceGeneration(ctx, &x.committing.writer, w.body, validated)
	}
	x.committing.memory += time.Since(start)
	x.slot.Enter() // an epoch that is reserved and not completed has protected its memtable so far
	switch {
	case err == storage.ErrRotating: //nolint:errorlint // see reserve
		return 0, nil
	case err != nil || !reserved:
		return 0, err
	}
	if w.reads != nil {
		w.reads.validation = storage.Validation{} // see validateWindow
	}
	return x.committing.writer.Epoch(), nil
}

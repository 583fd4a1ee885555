package mvcc

import (
	"context"
	"encoding/binary"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// lockTriesMax bounds how often a commit gives back its latches to begin again. Others take what it needs each time only by chance.
const lockTriesMax = 16

// lockReady takes the latches of a commit that will neither wait nor read many pages while it holds them. Writers of other keys in the same stripes
// would wait for that, too: nearly all writers, if the commit has many keys.
//
// Before it takes them, it waits for room in memory and in the log, and validates what the commit has read. When it has them, others may have taken the
// room, or a merge what was validated, or a lease may be full, and it has to count which keys are attached. Then it gives the latches back, and begins again.
func (x *Session) lockReady(ctx context.Context, w *Write) error {
	var need *storage.Demand
	if w.needsRoom() {
		need = x.demand(w)
	}
	for try := 1; ; try++ {
		if w.reads != nil || w.firstWins || w.Batch.WithMetadata() > 0 || need != nil && !x.store.engine.HasRoom(need) {
			x.LeaveTurn()
		}
		if err := x.awaitRoom(ctx, need); err != nil {
			return err
		}
		if err := x.prevalidate(ctx, w); err != nil {
			return err
		}
		if err := x.countUnattached(ctx, w); err != nil {
			return err
		}
		if err := x.turnOf(ctx, w); err != nil {
			return err
		}
		if err := x.lock(ctx, w); err != nil {
			return err
		}
		if try == lockTriesMax || x.isReady(w, need) {
			return nil
		}
		x.unlock()
	}
}

// largeCommitMin is from how many bytes on a commit waits for room however few its keys are: the memtable and the log buffer that it gets exist
// beside those of the large one before it.
const largeCommitMin = 1 << 20

// needsRoom reports whether a commit waits for room before it takes its latches: it writes, and is large, or many other writers may wait for the latches.
func (w *Write) needsRoom() bool {
	if w.load != nil || w.Batch.Count() == 0 {
		return false
	}
	return w.Batch.Count()+len(w.Conditions)+len(w.derived.ends) >= readBeforeMin || w.isLarge()
}

// isLarge reports whether a commit has largeCommitMin, as far as that is known before it reads.
func (w *Write) isLarge() bool {
	n := w.body.Size()
	for i := 0; i < len(w.ops) && n < largeCommitMin; i++ {
		n += len(w.ops[i].Operand)
	}
	return n >= largeCommitMin
}

// demand is what the record of a commit will need at most, with what the commit computes while it holds its latches, unless others write larger values
// of its keys before it has them.
func (x *Session) demand(w *Write) *storage.Demand {
	d := &storage.Demand{Body: w.body, Frees: w.ops == nil && w.frees()} // the deletions of an InvokeAll are placeholders
	d.More = len(x.buffers.invoked) + x.buffers.aloneBytes               // old values, and their metadata
	for i := 0; i < min(len(w.ops), len(x.buffers.before)); i++ {
		r := &x.buffers.before[i]
		d.More -= int(r.value-r.from) + x.buffers.valueBytes(r) - w.ops[i].keptOf(&x.buffers, r)
	}
	if w.ops != nil && w.request != nil {
		d.More += recordHeaderBytes + resultBytesMax
	}
	for i := range w.ops {
		d.More += w.ops[i].moreBytesMax()
		addOwned(d, w.ops[i].queueRecordsMax(), 1+len(w.ops[i].Key))
	}
	for i := 0; w.ops == nil && w.Batch.WithMetadata() > 0 && i < w.Batch.Count(); i++ {
		addOwned(d, w.ownedRecordsMax(i), len(w.Batch.Key(i)))
	}
	return d
}

// addOwned adds to a demand so many records that a key owns, whose internal key has so many bytes.
func addOwned(d *storage.Demand, records, keyBytes int) {
	d.Records += records
	d.More += records * (batch.OperationBytesMax + keys.OwnedBytes + keyBytes)
}

// moreBytesMax is how much longer the new version is than the old value with its metadata.
func (op *Invoke) moreBytesMax() int {
	n := binary.MaxVarintLen32 + len(op.Operand) // the value's length
	switch op.Kind {
	case InvokeAdd, InvokeMin, InvokeMax:
		n += integerBytesMax
	}
	if op.ExpiresAt != 0 {
		n += metadata.DeadlineBytesMax
	}
	return n
}

// queueRecordsMax is how many records of the expiry queue the operation writes, if the key has a deadline.
func (op *Invoke) queueRecordsMax() int {
	if op.ExpiresAt != 0 {
		return deadlineRecordsMax
	}
	switch op.Kind {
	case InvokeAdd, InvokeAppend, InvokeMin, InvokeMax, InvokeTouch:
		return 0 // the deadline is kept
	}
	return 1
}

// awaitRoom waits for room; nil needs none.
func (x *Session) awaitRoom(ctx context.Context, need *storage.Demand) error {
	if need == nil {
		return nil
	}
	began := time.Now()
	err := x.store.engine.AwaitRoom(ctx, need)
	x.committing.memory += time.Since(began)
	return err
}

// isReady reports whether what lockReady did is still true, now that the latches are held.
func (x *Session) isReady(w *Write, need *storage.Demand) bool {
	s := x.store
	if need != nil && !s.engine.HasRoom(need) {
		return false
	}
	if !x.knowsAttached(w) {
		return false
	}
	if w.firstWins && w.Batch.Count() >= readBeforeMin && s.engine.TreeEpoch() > w.snapshot && s.latches.newest(&x.committing.held) > w.snapshot {
		return false
	}
	if w.reads == nil || len(w.reads.points)+len(w.reads.ranges) < readBeforeMin {
		return true
	}
	x.slot.Enter()
	defer x.slot.Leave()
	return s.engine.ResumeValidation(&w.reads.validation)
}

package mvcc

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/storage"
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
		if err := x.awaitRoom(ctx, need); err != nil {
			return err
		}
		if err := x.prevalidate(ctx, w); err != nil {
			return err
		}
		if err := x.countUnattached(ctx, w); err != nil {
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

// needsRoom reports whether a commit waits for room before it takes its latches: it writes, and many other writers may wait for the latches.
func (w *Write) needsRoom() bool {
	return w.load == nil && w.Batch.Count() > 0 && w.Batch.Count()+len(w.Conditions)+len(w.derived.ends) >= readBeforeMin
}

// demand is about what the record of a commit will need, with what the commit computes while it holds its latches.
func (x *Session) demand(w *Write) *storage.Demand {
	d := &storage.Demand{Body: w.body, Frees: w.ops == nil && w.Batch.OnlyDeletes()}        // the deletions of an InvokeAll are placeholders
	if d.More = len(x.buffers.invoked) + x.buffers.aloneBytes; w.Batch.WithMetadata() > 0 { // entries of the expiry queue, attachments
		d.More += w.Batch.Size()
	}
	for i := range w.ops {
		d.More += len(w.ops[i].Operand)
	}
	return d
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

package mvcc

import (
	"context"
	"time"
)

// lockTriesMax bounds how often a commit gives back its latches to begin again. Others take what it needs each time only by chance.
const lockTriesMax = 16

// lockReady takes the latches of a commit when nothing is left for which it would have to wait, or read many pages, while it holds them: all writers of
// other keys in the same stripes would wait for that, too, and if it has many keys, these are nearly all writers. Before, it waits for room in memory and
// in the log, and validates what it has read. If others have taken the room when it has its latches, or a merge has taken what was validated, it gives the
// latches back and does so again.
func (x *Session) lockReady(ctx context.Context, w *Write) error {
	for try := 1; ; try++ {
		if err := x.awaitRoom(ctx, w); err != nil {
			return err
		}
		if err := x.prevalidate(ctx, w); err != nil {
			return err
		}
		if err := x.lock(ctx, w); err != nil {
			return err
		}
		if try == lockTriesMax || x.isReady(w) {
			return nil
		}
		x.unlock()
	}
}

// locksMany reports whether many other writers may wait for the latches of a commit.
func (w *Write) locksMany() bool {
	return w.Batch.Count()+len(w.Conditions)+len(w.derived.ends) >= readBeforeMin && w.load == nil
}

// needsRoom reports whether a commit waits for room before it takes its latches.
func (w *Write) needsRoom() bool { return w.locksMany() && w.Batch.Count() > 0 }

func (x *Session) awaitRoom(ctx context.Context, w *Write) error {
	if !w.needsRoom() {
		return nil
	}
	began := time.Now()
	err := x.store.engine.AwaitRoom(ctx, w.body, x.growth(w))
	x.committing.memory += time.Since(began)
	return err
}

// growth is about how many bytes a commit adds to its record, and to the memtable, while it holds its latches.
func (x *Session) growth(w *Write) int {
	bytes := len(x.buffers.invoked)
	for i := range w.ops {
		bytes += len(w.ops[i].Operand)
	}
	if w.Batch.WithMetadata() > 0 { // entries of the expiry queue, attachments
		bytes += w.Batch.Size()
	}
	return bytes
}

// isReady reports whether what lockReady did is still true, now that the latches are held.
func (x *Session) isReady(w *Write) bool {
	s := x.store
	if w.needsRoom() && !s.engine.HasRoom(w.body, x.growth(w)) {
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

package mvcc

import (
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// readBeforeMin is how many keys a commit reads at least while it holds its latches, so that their pages are read before.
const readBeforeMin = 32

// readBefore reads the pages of what w is going to read while it holds its latches, and they are not held yet: one after the other, and
// with many latches, pages that the device has to read would hold up all writers. Here those that are not in memory are read
// together. The commit reads again what is evicted or written meanwhile, and meets damage then.
//
// A condition that holds in the snapshot is not read again unless its key is written: many would not fit in the cache. So the caller keeps
// the snapshot until the commit has ended, and closes it if readBefore reports that it has opened one.
func (x *Session) readBefore(ctx context.Context, w *Write) (opened bool, _ error) {
	for i := range w.Conditions {
		w.Conditions[i].held = 0
	}
	n := len(w.Conditions) + len(w.derived.ends)
	if w.ops != nil || w.Batch.WithMetadata() > 0 {
		n += w.Batch.Count()
	}
	if n < readBeforeMin {
		return false, nil
	}
	defer x.buffers.batch.forget()
	list := x.readUnderLatches(w)
	if len(list) < readBeforeMin {
		return false, nil
	}
	if !x.hasSnapshot { // without one, a pause could be the end of what a leaf that was read refers to
		_, _ = x.OpenSnapshot(0) // which is there
		opened = true
	}
	x.slot.Enter()
	defer x.slot.Leave()
	_ = x.reader.GetAll(&x.buffers.batch.finder, list, x.at, storage.Visits{
		Each: func(i int, v storage.Version, ok bool) error {
			small := !ok || v.Inline() != nil || v.Size() <= largeValueMin // of larger ones a batch has few
			switch {
			case !small:
			case i < len(w.Conditions):
				if holds, err := x.conditionHolds(&w.Conditions[i], v, ok); holds && err == nil {
					w.Conditions[i].held = x.at
					x.reveals(v.Sync, v.Epoch)
				}
			case ok && v.Inline() == nil && w.ops != nil:
				scratch := &x.committing.writer.Scratch
				*scratch, _ = x.reader.AppendValue((*scratch)[:0], v)
			}
			return nil
		},
		Pause: x.pauseIn(ctx),
	})
	return opened, endOf(ctx)
}

// checkFirstBefore is checkFirst while no latch is held, for many keys, if the tree has versions newer than the snapshot: a page may have to be
// read for each of the keys. Under the latches only what was committed since then is looked for.
func (x *Session) checkFirstBefore(ctx context.Context, w *Write) error {
	if !w.firstWins || w.Batch.Count() < readBeforeMin || x.store.engine.TreeEpoch() <= w.snapshot {
		return nil
	}
	x.slot.Enter()
	defer x.slot.Leave()
	visible := x.store.Visible()
	if err := x.checkFirst(w, x.pauseIn(ctx)); err != nil {
		return err
	}
	w.snapshot = visible
	return nil
}

// readUnderLatches are the internal keys that w reads while it holds its latches, in the session's buffers.
func (x *Session) readUnderLatches(w *Write) [][]byte {
	b, size := &x.buffers.batch, 0
	for i := range w.Conditions {
		size += len(w.Conditions[i].Key) + conditionKeyBytes
	}
	b.buf, b.keys = slices.Grow(b.buf[:0], size), b.keys[:0]
	for i := range w.Conditions {
		from := len(b.buf)
		b.buf = w.Conditions[i].appendInternal(b.buf)
		b.keys = append(b.keys, b.buf[from:])
	}
	for i := range w.Batch.Count() {
		if keys.SpaceOf(w.Batch.Key(i)) != keys.SpaceUser {
			continue // the record of a request
		}
		f, _ := w.Batch.Metadata(i) // an error ends the commit later
		if w.ops != nil || f.ExpiresAt != 0 {
			b.keys = append(b.keys, w.Batch.Key(i))
		}
	}
	from := 0
	for _, end := range w.derived.ends {
		b.keys = append(b.keys, w.derived.latches[from:end])
		from = end
	}
	return b.keys
}

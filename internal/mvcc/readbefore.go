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
// A condition that holds in the snapshot, and the version that an invocation is applied to, are not read again unless the key is written: many
// would not fit in the cache. So the caller keeps the snapshot until the commit has ended, and closes it if readBefore reports that it has
// opened one.
func (x *Session) readBefore(ctx context.Context, w *Write) (opened bool, _ error) {
	for i := range w.Conditions {
		w.Conditions[i].held = 0
	}
	x.buffers.before, x.buffers.invoked = x.buffers.before[:0], x.buffers.invoked[:0]
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
	conditions := len(w.Conditions)
	x.buffers.before = append(x.buffers.before, make([]readVersion, len(w.ops))...)
	small, full := 0, false
	_ = x.reader.GetAll(&x.buffers.batch.finder, list, x.at, storage.Visits{
		Each: func(i int, v storage.Version, ok bool) error {
			switch {
			case ok && v.Inline() == nil && v.Size() > largeValueMin: // of these a batch has few
			case i < conditions:
				if holds, err := x.conditionHolds(&w.Conditions[i], v, ok); holds && err == nil {
					w.Conditions[i].held = x.at
					x.reveals(v.Sync, v.Epoch)
				}
			case i-conditions < len(x.buffers.before) && !full:
				small, full = x.keepBefore(&x.buffers.before[i-conditions], v, ok, small)
			}
			return nil
		},
		Pause: x.pauseIn(ctx),
	})
	return opened, endOf(ctx)
}

// readVersion is a version that readBefore has found.
type readVersion struct {
	at, epoch        keys.Epoch // the snapshot, zero if it was not read; that of the version if found
	found            bool       // it has a value
	from, value, end int        // of the metadata and the value in sessionBuffers.invoked
}

func (r *readVersion) section(buf []byte) []byte { return buf[r.from:r.value:r.value] }

func (r *readVersion) valueIn(buf []byte) []byte {
	if !r.found {
		return nil
	}
	return buf[r.value:r.end:r.end]
}

// readBeforeOf is what readBefore has found for an operation of InvokeAll; nil for nothing.
func (x *Session) readBeforeOf(i int) *readVersion {
	if i < len(x.buffers.before) && x.buffers.before[i].at != 0 {
		return &x.buffers.before[i]
	}
	return nil
}

// keepBefore remembers a version that an operation of InvokeAll is applied to, with so many bytes of small values that are not admitted yet. It
// reports full when no more may be kept; the commit reads the others, and refuses what is too much.
func (x *Session) keepBefore(r *readVersion, v storage.Version, ok bool, small int) (_ int, full bool) {
	buf := &x.buffers.invoked
	kept := readVersion{at: x.at, from: len(*buf), value: len(*buf), end: len(*buf)}
	if ok && v.Kind.HasValue() {
		if len(*buf)+v.Size() > x.store.options.Limits.BatchBytes {
			return small, true
		}
		var err error
		if small, err = x.admitSmall(small, v.Size()); err != nil || x.admitted(v.Size()) != nil {
			return small, true
		}
		kept.epoch, kept.found = v.Epoch, true
		*buf = append(*buf, v.Section()...)
		kept.value = len(*buf)
		if *buf, err = x.reader.AppendValue(*buf, v); err != nil {
			*buf = (*buf)[:kept.from]
			return small, false // the commit meets the damage
		}
		kept.end = len(*buf)
	}
	if ok {
		x.reveals(v.Sync, v.Epoch)
	}
	*r = kept
	return small, false
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
	for i := range w.ops {
		size += len(w.ops[i].Key) + conditionKeyBytes
	}
	b.buf, b.keys = slices.Grow(b.buf[:0], size), b.keys[:0]
	for i := range w.Conditions {
		from := len(b.buf)
		b.buf = w.Conditions[i].appendInternal(b.buf)
		b.keys = append(b.keys, b.buf[from:])
	}
	for i := range w.ops { // the batch has their keys in another order
		from := len(b.buf)
		b.buf = keys.Append(b.buf, keys.SpaceUser, w.ops[i].Key)
		b.keys = append(b.keys, b.buf[from:])
	}
	for i := 0; w.ops == nil && i < w.Batch.Count(); i++ {
		if keys.SpaceOf(w.Batch.Key(i)) != keys.SpaceUser {
			continue // the record of a request
		}
		f, _ := w.Batch.Metadata(i) // an error ends the commit later
		if f.ExpiresAt != 0 {
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

package mvcc

import (
	"cmp"
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
)

// readBeforeMin is how many keys a commit reads at least while it holds its latches, so that their pages are read before.
const readBeforeMin = 32

// readBefore reads the pages of what w is going to read while it holds its latches, and they are not held yet: one after the other, and
// with many latches, pages that the device has to read would hold up all writers. Here those that are not in memory are read
// together. The commit reads again what is written meanwhile, and meets damage then.
//
// A condition that holds in the snapshot, the version that an invocation is applied to, and the deadline that a put replaces, are not read again
// unless the key is written: many would not fit in the cache. So the caller keeps the snapshot until the commit has ended, and closes it if
// readBefore reports that it has opened one. An error refuses the commit: the context has ended, or there is no room for what it would answer.
func (x *Session) readBefore(ctx context.Context, w *Write) (opened bool, _ error) {
	for i := range w.Conditions {
		w.Conditions[i].held = 0
	}
	x.buffers.before, x.buffers.invoked, x.committing.small = x.buffers.before[:0], x.buffers.invoked[:0], 0
	x.buffers.forgetAlone()
	n := len(w.Conditions) + len(w.derived.ends)
	if w.ops != nil || w.Batch.WithMetadata() > 0 {
		n += w.Batch.Count()
	}
	if n < readBeforeMin {
		return false, nil
	}
	defer x.buffers.batch.forget()
	list, keep := x.readUnderLatches(w)
	if len(list) < readBeforeMin {
		return false, nil
	}
	x.LeaveTurn()
	if !x.hasSnapshot { // without one, a pause could be the end of what a leaf that was read refers to
		_, _ = x.OpenSnapshot(0) // which is there
		opened = true
	}
	x.slot.Enter()
	defer x.slot.Leave()
	conditions := len(w.Conditions)
	x.buffers.before = append(x.buffers.before, make([]readVersion, keep)...)
	var refused error
	room, kept := x.store.options.Limits.roomOf(w.ops), 0
	_ = x.reader.GetAll(&x.buffers.batch.finder, list, x.at, storage.Visits{
		Each: func(i int, v storage.Version, ok bool) error {
			switch {
			case i < conditions:
				if holds, err := x.conditionHolds(&w.Conditions[i], v, ok); holds && err == nil {
					w.Conditions[i].held = x.at
					x.reveals(v.Sync, v.Epoch)
				}
			case i-conditions < keep:
				if kept++; ok && v.Kind.HasValue() {
					x.reserveBefore(kept, keep, bytesBefore(&v, w.ops != nil), room.left())
				}
				refused = x.keepBefore(&x.buffers.before[i-conditions], v, ok, w.ops != nil, room.left())
			}
			return refused
		},
		Pause: x.pauseIn(ctx),
	})
	return opened, cmp.Or(endOf(ctx), refused)
}

// readVersion is what readBefore has found of a key: the metadata of its version and, for an invocation, the value. They are in
// sessionBuffers.invoked, one after the other, but for a value that is alone.
type readVersion struct {
	epoch            keys.Epoch // of the version if found
	from, value, end uint32     // at most Limits.BatchBytes and what it takes for the metadata
	read, found      bool       // it was read, and has a value
	alone            bool       // the value is sessionBuffers.alone[end]
}

// recall is the version that readBefore has kept of an operation, whose key is x.key and latched; its metadata is in Metadata. It reports kept if
// there is one, and it is the newest version of the key.
func (x *Session) recall(i int) (value []byte, found bool, epoch keys.Epoch, kept bool) {
	if i >= len(x.buffers.before) || !x.buffers.before[i].read {
		return nil, false, 0, false
	}
	x.slot.Enter()
	defer x.slot.Leave()
	if !x.unchangedSince(x.at) {
		return nil, false, 0, false
	}
	r, buf := &x.buffers.before[i], x.buffers.invoked
	x.section = append(x.section[:0], buf[r.from:r.value]...)
	if r.alone {
		return x.buffers.alone[r.end], r.found, r.epoch, true
	}
	return buf[r.value:r.end:r.end], r.found, r.epoch, true
}

// bytesBefore is what keepBefore keeps of a version in sessionBuffers.invoked.
func bytesBefore(v *storage.Version, values bool) int {
	n := len(v.Section())
	if size := v.Size(); values && !isAlone(size) {
		n += size
	}
	return n
}

// reserveBefore makes room for so many more bytes of what keepBefore keeps, at most most in all, and as much for the versions to come as for those that
// were met. A buffer that only grew with the values would be in memory twice, again and again. It does not become very much larger at once, because the
// first values may be larger than most.
func (x *Session) reserveBefore(met, all, more, most int) {
	buf := &x.buffers.invoked
	n := len(*buf) + more
	if n <= cap(*buf) || n > most || met < readBeforeMin {
		return
	}
	expected := n / met * all
	if expected += expected / 16; expected > 16*n {
		expected = 4 * n
	}
	*buf = slices.Grow(*buf, max(n, min(expected, most))-len(*buf))
}

// keepBefore remembers a version that an operation of InvokeAll is applied to, or whose deadline is replaced. It keeps no more values than the
// commit may read, most, which refuses those that are too much.
func (x *Session) keepBefore(r *readVersion, v storage.Version, ok, values bool, most int) (err error) {
	buf := &x.buffers.invoked
	at := uint32(len(*buf))
	kept := readVersion{from: at, value: at, end: at, read: true}
	if ok && v.Kind.HasValue() {
		kept.epoch, kept.found = v.Epoch, true
		*buf = append(*buf, v.Section()...)
		kept.value = uint32(len(*buf))
		if values {
			if len(*buf)+x.buffers.aloneBytes+v.Size() > most {
				*buf = (*buf)[:at]
				return nil
			}
			if err = x.admitKept(v.Size()); err != nil {
				return err
			}
			if kept.alone = isAlone(v.Size()); kept.alone {
				var value []byte
				value, err = x.reader.AppendValue(place(buf, v.Size()), v)
				x.buffers.alone, x.buffers.aloneBytes = append(x.buffers.alone, value), x.buffers.aloneBytes+len(value)
			} else {
				*buf, err = x.reader.AppendValue(*buf, v)
			}
			if err != nil {
				*buf = (*buf)[:at]
				return nil //nolint:nilerr // the commit meets the damage
			}
		}
		if kept.end = uint32(len(*buf)); kept.alone {
			kept.end = uint32(len(x.buffers.alone) - 1)
		}
	}
	if ok && values {
		x.reveals(v.Sync, v.Epoch)
	}
	*r = kept
	return nil
}

// valueBytes is the length of the value that readBefore has kept of an operation.
func (b *sessionBuffers) valueBytes(r *readVersion) int {
	if r.alone {
		return len(b.alone[r.end])
	}
	return int(r.end - r.value)
}

// keptValueBytes is the length of all values that readBefore has kept.
func (b *sessionBuffers) keptValueBytes() (n int) {
	for i := range b.before {
		n += b.valueBytes(&b.before[i])
	}
	return n
}

// keptOf is how much of what readBefore has kept, the value and the metadata, the operation writes again.
func (op *Invoke) keptOf(b *sessionBuffers, r *readVersion) int {
	section := int(r.value - r.from)
	switch op.Kind {
	case InvokeAppend, InvokeTouch, InvokePersist:
		return section + b.valueBytes(r)
	case InvokeAdd, InvokeMin, InvokeMax:
		return section
	}
	return 0
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

// readUnderLatches are the internal keys that w reads while it holds its latches, in the session's buffers: those of conditions, of operations,
// and of Latch. Of the operations, what is read is kept.
func (x *Session) readUnderLatches(w *Write) (list [][]byte, operations int) {
	b, size := &x.buffers.batch, 0
	for i := range w.Conditions {
		size += len(w.Conditions[i].Key) + conditionKeyBytes
	}
	for i := range w.ops {
		size += len(w.ops[i].Key) + conditionKeyBytes
	}
	b.buf, b.keys = slices.Grow(b.buf[:0], size), slices.Grow(b.keys[:0], len(w.Conditions)+len(w.ops)+len(w.derived.ends))
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
	for i := 0; w.ops == nil && w.derived.under == nil && i < w.Batch.Count(); i++ {
		if hasDeadline(w, i) {
			b.keys = append(b.keys, w.Batch.Key(i))
		}
	}
	operations = len(b.keys) - len(w.Conditions)
	from := 0
	for _, end := range w.derived.ends {
		b.keys = append(b.keys, w.derived.latches[from:end])
		from = end
	}
	return b.keys, operations
}

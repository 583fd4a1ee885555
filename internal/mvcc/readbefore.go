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
func (x *Session) readBefore(ctx context.Context, w *Write) error {
	n := len(w.Conditions) + len(w.derived.ends)
	if w.ops != nil || w.Batch.WithMetadata() > 0 {
		n += w.Batch.Count()
	}
	if n < readBeforeMin {
		return nil
	}
	list := x.readUnderLatches(w)
	if len(list) < readBeforeMin {
		return nil
	}
	defer x.buffers.batch.forget()
	x.slot.Enter()
	defer x.slot.Leave()
	_ = x.reader.GetAll(&x.buffers.batch.finder, list, keys.MaxEpoch, storage.Visits{
		Each:  func(int, storage.Version, bool) error { return nil },
		Pause: x.pauseIn(ctx),
	})
	return endOf(ctx)
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

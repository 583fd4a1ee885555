package mvcc

import (
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
)

// A version with a deadline has an entry in the expiry queue: a record in SpaceSystem whose key begins with the deadline, so
// that the queue is in the order of deadlines. The commit that writes the version writes the entry.
//
// Invariants:
//   - A key whose newest version has a deadline has the entry of that deadline.
//   - An entry is changed only under the latch of its key. An entry whose deadline is not that of the key's newest version is
//     stale. It does no harm, and is deleted when its deadline has passed.
//
// A write that sets a deadline deletes the entry of the version before, because a key that is refreshed every second would
// leave thousands of entries. A write without a deadline looks at nothing, so that it costs nothing.

// queueDeadlines adds the queue entries of the versions in the batch. The caller holds the latches of their keys.
func (x *Session) queueDeadlines(ctx context.Context, w *Write) error {
	if w.Batch.WithMetadata() == 0 || w.derived.queued {
		return nil
	}
	for i, n, deadlines := 0, w.Batch.Count(), 0; i < n; i++ {
		if i%checkContextEvery == 0 && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		f, err := w.Batch.Metadata(i)
		if err != nil || f.ExpiresAt == 0 {
			if err != nil {
				return err
			}
			continue
		}
		x.key = append(x.key[:0], w.Batch.Key(i)...)
		before, err := x.newestMetadata(deadlines)
		if err != nil && !errors.Is(err, storage.ErrDamaged) {
			return err
		}
		// The entry of a version that a damaged page hides stays, and is stale from now on: a put is not refused because of
		// what it overwrites.
		x.requeue(w, before.ExpiresAt, f.ExpiresAt)
		deadlines++
	}
	return nil
}

// hasDeadline reports whether an operation of the batch sets a deadline; an error of its metadata ends the commit later.
func hasDeadline(w *Write, i int) bool {
	f, _ := w.Batch.Metadata(i)
	return f.ExpiresAt != 0
}

// newestMetadata is the metadata of the newest version of the key in x.key, whose latch is held and which is one of those that readBefore may
// have kept. It does not read the value.
func (x *Session) newestMetadata(i int) (f metadata.Fields, err error) {
	if _, _, _, kept := x.recall(i); kept {
		return x.Metadata()
	}
	x.slot.Enter()
	defer x.slot.Leave()
	v, ok, err := x.reader.Newest(x.key)
	if err != nil || !ok {
		return f, ofKey(err, x.key)
	}
	return v.Metadata()
}

// requeue replaces the queue entry of the key in x.key; zero is no deadline.
func (x *Session) requeue(w *Write, before, after uint64) {
	if before == after {
		return
	}
	if before != 0 {
		x.entry = keys.AppendOwned(x.entry[:0], keys.SystemExpiry, before, x.key)
		w.Batch.DeleteRecord(keys.SpaceSystem, x.entry)
	}
	if after != 0 {
		x.entry = keys.AppendOwned(x.entry[:0], keys.SystemExpiry, after, x.key)
		w.Batch.SetRecord(keys.SpaceSystem, x.entry, nil)
		if w.derived.soonest == 0 || after < w.derived.soonest {
			w.derived.soonest = after
		}
	}
}

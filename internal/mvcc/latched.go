package mvcc

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage"
)

// A commit may compute operations while it holds the latches of its keys, from versions that remain the newest until it is
// installed:
//
//	latch ─► request id, conditions ─► InvokeAll: operations from old values ─► Under ─► queue entries of deadlines ─► reserve
//
// Records that belong to a key (keys.Owner) are protected by the latch of that key, so that a commit can write them without
// knowing their keys when it takes its latches.

// derivation is what a Write computes under its latches.
type derivation struct {
	latches    []byte       // internal keys of Latch, one after the other
	ends       []int        // where each of them ends
	leases     []leasedKeys // that the batch named when the latches were taken
	unattached unattachedCount
	under      func(*Latched) error
	queued     bool      // the operations of an InvokeAll have changed the expiry queue themselves
	released   time.Time // when the latches were released, if there is a function under
	soonest    uint64    // earliest deadline that the commit adds to the expiry queue; zero if there is none
}

func (d *derivation) reset() {
	d.latches, d.ends, d.leases, d.under, d.queued, d.soonest = d.latches[:0], d.ends[:0], d.leases[:0], nil, false, 0
	d.unattached.wanted, d.unattached.at = false, 0
}

// Latch makes the commit take the latch of an internal key that it does not write.
func (w *Write) Latch(internal []byte) {
	w.derived.latches = append(w.derived.latches, internal...)
	w.derived.ends = append(w.derived.ends, len(w.derived.latches))
}

// Under sets a function that the commit calls while it holds its latches. It may add operations to the batch, or reset and
// fill it, as long as their latches are held. Its error ends the commit, and an empty batch means that nothing is written.
func (w *Write) Under(f func(*Latched) error) { w.derived.under = f }

// SetOwn says that the commit is the store's own: its batch may have nothing but records.
func (w *Write) SetOwn() { w.own = true }

// Latched is a commit that holds its latches.
type Latched struct {
	session *Session
	write   *Write
	ctx     context.Context
	value   []byte
}

// Write is the commit's write.
func (l *Latched) Write() *Write { return l.write }

// Newest is the newest version of a key. Without a value, the epoch is that of the deletion, or zero.
type Newest struct {
	Found    bool
	Epoch    keys.Epoch
	Metadata metadata.Fields
	Value    []byte // of a record of the store; empty if it is stored outside of the leaf; valid until the next call
}

// Newest reads the newest version of an internal key whose latch is held. The outcome of the commit reveals it.
func (l *Latched) Newest(internal []byte) (n Newest, err error) {
	if l.ctx.Err() != nil {
		return n, context.Cause(l.ctx)
	}
	x := l.session
	x.slot.Enter()
	defer x.slot.Leave()
	v, ok, err := x.reader.Newest(internal)
	if err != nil || !ok {
		return n, ofKey(err, internal)
	}
	x.reveals(v.Sync, v.Epoch)
	if n.Epoch, n.Found = v.Epoch, v.Kind.HasValue(); !n.Found {
		return n, nil
	}
	if keys.SpaceOf(internal) == keys.SpaceSystem { // a memtable may have large values of clients
		l.value = append(l.value[:0], v.Inline()...)
		n.Value = l.value
	}
	n.Metadata, err = v.Metadata()
	return n, err
}

// compute completes the batch of a commit that holds its latches. For most commits it does nothing.
func (x *Session) compute(ctx context.Context, w *Write) error {
	if w.ops == nil && w.derived.under == nil && w.Batch.WithMetadata() == 0 {
		return nil
	}
	if w.ops != nil {
		if err := x.applyAll(ctx, w.ops, w, w.outcomes); err != nil {
			return err
		}
	}
	if w.derived.under != nil {
		if err := w.derived.under(&Latched{session: x, write: w, ctx: ctx}); err != nil {
			return err
		}
	}
	if w.Batch.Count() == 0 {
		return nil
	}
	if err := x.attachLeases(w); err != nil {
		return err
	}
	if err := x.queueDeadlines(ctx, w); err != nil {
		return err
	}
	if size := w.Batch.Size(); size > storage.BatchBytesMax(0) {
		return &LimitError{What: "batch bytes with the records of its keys", Limit: storage.BatchBytesMax(0), Got: size}
	}
	return x.prepare(w)
}

// latchKey is the key whose latch protects an internal key: its own, or that of the key that it belongs to.
func latchKey(internal []byte) []byte {
	if keys.SpaceOf(internal) == keys.SpaceSystem {
		if owner, ok := keys.Owner(internal); ok {
			return owner
		}
	}
	return internal
}

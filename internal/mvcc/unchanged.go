package mvcc

import (
	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// UnchangedSince reports whether no key in [lower, upper) was written or deleted after an epoch, up
// to the transaction's snapshot. A nil upper is no bound. The range counts as read. If the epoch is
// not readable, the error is *SnapshotGoneError. *ConflictError may tell of a bulk load that is not
// visible yet.
//
// UnchangedSince looks at versions, because a comparison of two states would miss a key that was
// put and deleted again. While an epoch is readable, garbage collection drops only superseded
// versions after it. The newest version of each key remains, even if it is a tombstone.
func (t *Txn) UnchangedSince(lower, upper []byte, since keys.Epoch) (bool, error) {
	if !t.open {
		return false, ErrNoTransaction
	}
	if invariants.Enabled {
		t.session.assertRange(lower, upper)
	}
	past := t.session.store.registry.Slot() // no session: those of other requests would be fewer
	defer past.Free()
	if err := t.session.store.openSnapshotAt(past, since); err != nil { // the snapshot keeps the epoch readable
		return false, err
	}
	from, to := keys.Append(nil, keys.SpaceUser, lower), []byte{byte(keys.SpaceUser) + 1}
	if upper != nil {
		to = keys.Append(nil, keys.SpaceUser, upper)
	}
	if t.validated() {
		t.reads.addRange(from, to)
	}
	x := t.session
	x.slot.Enter()
	defer x.slot.Leave()
	epoch, changed, err := x.reader.ChangedSince(x.store.engine.Pin(), from, to, since, t.at+1)
	if err != nil {
		return false, err
	}
	if changed && epoch > t.at { // a merge has newer versions than the snapshot; only a newer snapshot can give the answer
		return false, x.conflict(&t.reads, from, true, epoch)
	}
	if changed { // the tree does not store whether the commit was SYNC, so assume it
		t.await = max(t.await, x.store.mustAwait(true, epoch))
	}
	return !changed, t.checkSize()
}

package mvcc

import (
	"github.com/epochkv/epochkv/internal/keys"
)

// UnchangedSince reports whether no key in [lower, upper) was written or deleted after an epoch, up to the transaction's snapshot; a nil upper
// means to the end. The range counts as read. The epoch must be readable: *SnapshotGoneError.
//
// Comparing the values of then and now would miss a key that was put and deleted again. The versions themselves tell: while an epoch
// is readable, what is dropped after it are versions that a newer one of the same key has replaced, and no key's newest one, be it a deletion.
func (t *Txn) UnchangedSince(lower, upper []byte, since keys.Epoch) (bool, error) {
	if !t.open {
		return false, ErrNoTransaction
	}
	past, err := t.session.store.Session()
	if err != nil {
		return false, err
	}
	defer past.Close()
	if _, err := past.OpenSnapshot(since); err != nil { // and keeps it
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
	if changed && epoch > t.at { // a checkpoint has taken in what the snapshot must not see: only a newer one can tell
		return false, t.reads.conflict(from, epoch)
	}
	if changed { // perhaps not a SYNC commit: the tree does not tell
		t.await = max(t.await, x.store.mustAwait(true, epoch))
	}
	return !changed, t.checkSize()
}

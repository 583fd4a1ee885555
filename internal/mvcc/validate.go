package mvcc

import (
	"epochkv/internal/storage"
	"epochkv/internal/storage/keys"
)

// readSet is what a commit read and needs unchanged: at its snapshot, ranges of internal keys. A single key is the range
// that ends right behind it.
type readSet struct {
	at     keys.Epoch
	ranges []keyRange
	pinned storage.Pinned // the memtables that validate saw
}

// keyRange is [lower, upper) over internal keys.
type keyRange struct{ lower, upper []byte }

// validate checks that nothing in the read set has a version newer than the snapshot. It may read pages. The caller is inside
// its slot's protection and stays there until validateSince.
func (x *Session) validate(r *readSet) error {
	r.pinned = x.store.engine.Pin()
	for _, k := range r.ranges {
		epoch, changed, err := x.store.engine.ChangedSince(r.pinned, k.lower, k.upper, r.at)
		if err != nil {
			return err
		}
		if changed {
			x.store.horizon.wait(epoch, x.parker)
			return &ConflictError{Key: keys.User(k.lower), Epoch: epoch}
		}
	}
	return nil
}

// validateSince checks what came between validate and the reservation of epoch. It waits for every smaller epoch, which
// cannot deadlock: they hold all their latches already. What came lies in the memtables that were pinned and in those
// that followed them, so there is no I/O, even if a checkpoint has merged some of them meanwhile.
func (x *Session) validateSince(r *readSet, epoch keys.Epoch) error {
	x.store.horizon.wait(epoch-1, x.parker)
	for _, k := range r.ranges {
		if newer, changed := x.store.engine.ChangedInMemory(r.pinned, k.lower, k.upper, r.at, epoch); changed {
			return &ConflictError{Key: keys.User(k.lower), Epoch: newer}
		}
	}
	return nil
}

package mvcc

import (
	"errors"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
)

// A version that names a lease is attached to it: the commit that writes the version writes a record in SpaceSystem, whose
// key begins with the lease, so that the end of the lease finds the key (package lease). Every commit does that in one
// place, whatever it is made from, and checks that the lease is live. The latch of the lease is held from the check to the
// installation, so that a revocation, which takes it as well, finds every attachment.
//
// A version that is replaced leaves its record. So a record may be stale, and the newest version of its key decides.

// ErrNoLeases means that a write names a lease, and nothing keeps leases.
var ErrNoLeases = errors.New("mvcc: leases are not in use")

// GuardLeases sets the function that commits ask whether a lease is live, while they hold its latch (LeaseLatch). It must
// not wait. Its error ends the commit. GuardLeases is called once, before the first write that names a lease.
func (s *Store) GuardLeases(check func(lease uint64) error) { s.leaseCheck.Store(&check) }

// LeaseLatch is the internal key whose latch protects a lease.
func LeaseLatch(dst []byte, lease uint64) []byte {
	return keys.AppendOwned(append(dst, byte(keys.SpaceSystem)), keys.SystemLease, lease, nil)
}

// latchLeases adds the latches of the leases that the batch names, and remembers the leases.
func (x *Session) latchLeases(w *Write) error {
	w.derived.leases = w.derived.leases[:0]
	if w.Batch.WithMetadata() == 0 {
		return nil
	}
	for i := range w.Batch.Count() {
		f, err := w.Batch.Metadata(i)
		if err != nil {
			return err
		}
		if f.Lease == 0 || slices.Contains(w.derived.leases[max(0, len(w.derived.leases)-1):], f.Lease) {
			continue // nearly always the same as before
		}
		w.derived.leases = append(w.derived.leases, f.Lease)
		x.key = LeaseLatch(x.key[:0], f.Lease)
		x.committing.held.add(x.store.latches, x.key)
	}
	return nil
}

// attachLeases checks the leases that the batch named when its latches were taken, and adds the attachments of its keys. A
// key that keeps the lease of its version before has an attachment.
func (x *Session) attachLeases(w *Write) error {
	if len(w.derived.leases) == 0 {
		return nil
	}
	check := x.store.leaseCheck.Load()
	if check == nil {
		return ErrNoLeases
	}
	for _, lease := range w.derived.leases {
		if err := (*check)(lease); err != nil {
			return err
		}
	}
	for i, n := 0, w.Batch.Count(); i < n; i++ {
		f, err := w.Batch.Metadata(i)
		if err != nil {
			return err
		}
		if f.Lease != 0 {
			x.entry = keys.AppendOwned(x.entry[:0], keys.SystemAttachment, f.Lease, w.Batch.Key(i))
			w.Batch.SetRecord(keys.SpaceSystem, x.entry, nil)
		}
	}
	return nil
}

package mvcc

import (
	"errors"

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

// ErrLeaseFull means that a lease has too many attachments for more of them.
var ErrLeaseFull = errors.New("mvcc: the lease has too many keys")

// GuardLeases sets the function that commits ask whether so many keys may be attached to a lease, while they hold its latch
// (LeaseLatch). It must not wait. Its error ends the commit, but for ErrLeaseFull if some of the keys are attached already: then it is
// asked again about the others. GuardLeases is called once, before the first write that names a lease.
func (s *Store) GuardLeases(admit func(lease uint64, keys int) error) { s.leaseCheck.Store(&admit) }

// LeaseLatch is the internal key whose latch protects a lease.
func LeaseLatch(dst []byte, lease uint64) []byte {
	return keys.AppendOwned(append(dst, byte(keys.SpaceSystem)), keys.SystemLease, lease, nil)
}

// leasedKeys are consecutive operations of a batch that name one lease.
type leasedKeys struct {
	lease uint64
	from  int // the first operation
	keys  int
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
		if f.Lease == 0 {
			continue
		}
		if n := len(w.derived.leases); n > 0 && w.derived.leases[n-1].lease == f.Lease { // nearly always the same as before
			w.derived.leases[n-1].keys++
			continue
		}
		w.derived.leases = append(w.derived.leases, leasedKeys{lease: f.Lease, from: i, keys: 1})
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
	admit := x.store.leaseCheck.Load()
	if admit == nil {
		return ErrNoLeases
	}
	for i := range w.derived.leases {
		of := &w.derived.leases[i]
		err := (*admit)(of.lease, of.keys)
		if errors.Is(err, ErrLeaseFull) {
			err = x.admitUnattached(w, of, *admit)
		}
		if err != nil {
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

// admitUnattached asks for those keys alone that are not attached yet: a put that replaces an attached key needs no room.
func (x *Session) admitUnattached(w *Write, of *leasedKeys, admit func(lease uint64, keys int) error) error {
	unattached := 0
	for i, left := of.from, of.keys; left > 0 && i < w.Batch.Count(); i++ {
		f, err := w.Batch.Metadata(i)
		if err != nil {
			return err
		}
		if f.Lease != of.lease {
			continue
		}
		left--
		x.key = keys.AppendOwned(append(x.key[:0], byte(keys.SpaceSystem)), keys.SystemAttachment, of.lease, w.Batch.Key(i))
		there, err := x.isThere()
		if err != nil {
			return err
		}
		if !there {
			unattached++
		}
	}
	return admit(of.lease, unattached)
}

// isThere reports whether the newest version of the internal key in x.key is a value.
func (x *Session) isThere() (bool, error) {
	x.slot.Enter()
	defer x.slot.Leave()
	v, ok, err := x.reader.Newest(x.key)
	return ok && v.Kind.HasValue(), ofKey(err, x.key)
}

package mvcc

import (
	"cmp"
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
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

// LeaseGuard is what commits ask about a lease while they hold its latch (LeaseLatch). It must not wait.
type LeaseGuard struct {
	// Admit attaches so many keys to a lease. Its error ends the commit, but for ErrLeaseFull if some of the keys are attached already: then it is
	// asked again about the others.
	Admit func(lease uint64, keys int) error
	// Room is how many keys Admit would attach now.
	Room func(lease uint64) int
}

// GuardLeases sets the guard of the leases. It is called once, before the first write that names a lease.
func (s *Store) GuardLeases(g LeaseGuard) { s.leaseGuard.Store(&g) }

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
	guard := x.store.leaseGuard.Load()
	if guard == nil {
		return ErrNoLeases
	}
	for i := range w.derived.leases {
		of := &w.derived.leases[i]
		err := guard.Admit(of.lease, of.keys)
		if errors.Is(err, ErrLeaseFull) {
			err = x.admitUnattached(w, i, guard)
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
func (x *Session) admitUnattached(w *Write, run int, guard *LeaseGuard) error {
	of := &w.derived.leases[run]
	if x.countHolds(w, of) {
		return guard.Admit(of.lease, int(w.derived.unattached.keys[run]))
	}
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
	return guard.Admit(of.lease, unattached)
}

// unattachedCount is how many keys of each of derivation.leases are not attached, counted while no latch was held.
type unattachedCount struct {
	wanted bool       // a lease may be full, and no count holds
	at     keys.Epoch // visible before the count; zero without one
	keys   []int32
}

// countChunk is how many attachments are looked for at once, in one guard.
const countChunk = 1000

// knowsAttached reports whether the leases of a commit of many keys have room for all of them, or it is known how many are not attached. To count
// them under the latches could take a page for each. The latches are held.
func (x *Session) knowsAttached(w *Write) bool {
	c, n := &w.derived.unattached, w.Batch.WithMetadata()
	c.wanted = false
	guard := x.store.leaseGuard.Load()
	if n < readBeforeMin || w.ops != nil || w.derived.under != nil || guard == nil {
		return true
	}
	for i := range w.derived.leases { // there may be many, with few keys each
		if of := &w.derived.leases[i]; guard.Room(of.lease) < n && !x.countHolds(w, of) {
			c.wanted = true
			return false
		}
	}
	return true
}

// countHolds reports whether nothing was attached to a lease, whose latch is held, since the count.
func (x *Session) countHolds(w *Write, of *leasedKeys) bool {
	c, l := &w.derived.unattached, x.store.latches
	if c.at == 0 {
		return false
	}
	x.key = LeaseLatch(x.key[:0], of.lease)
	return l.table[l.stripe(x.key)].newest <= c.at
}

// countUnattached counts what knowsAttached has asked for. No latch is held, so what others write meanwhile may be counted or not: then the count
// does not hold.
func (x *Session) countUnattached(ctx context.Context, w *Write) error {
	c, b := &w.derived.unattached, &x.buffers.batch
	if !c.wanted {
		return nil
	}
	defer b.forget()
	c.at, c.keys = x.store.Visible(), append(c.keys[:0], make([]int32, len(w.derived.leases))...)
	b.buf, b.keys = b.buf[:0], b.keys[:0]
	run, runs := -1, make([]int32, 0, countChunk) // of the keys of the chunk
	for i, n := 0, w.Batch.Count(); i < n; i++ {
		f, err := w.Batch.Metadata(i)
		if err != nil {
			return err
		}
		if f.Lease != 0 {
			if run < 0 || w.derived.leases[run].lease != f.Lease {
				run++
			}
			from := len(b.buf)
			b.buf = keys.AppendOwned(append(b.buf, byte(keys.SpaceSystem)), keys.SystemAttachment, f.Lease, w.Batch.Key(i))
			b.keys, runs = append(b.keys, b.buf[from:]), append(runs, int32(run))
		}
		if len(runs) < countChunk && i+1 < n {
			continue
		}
		x.slot.Enter()
		err = x.reader.GetAll(&b.finder, b.keys, keys.MaxEpoch, storage.Visits{Each: func(i int, v storage.Version, ok bool) error {
			if !ok || !v.Kind.HasValue() {
				c.keys[runs[i]]++
			}
			return nil
		}})
		x.slot.Leave()
		if err = cmp.Or(err, endOf(ctx)); err != nil {
			return err
		}
		b.buf, b.keys, runs = b.buf[:0], b.keys[:0], runs[:0]
	}
	return nil
}

// isThere reports whether the newest version of the internal key in x.key is a value.
func (x *Session) isThere() (bool, error) {
	x.slot.Enter()
	defer x.slot.Leave()
	v, ok, err := x.reader.Newest(x.key)
	return ok && v.Kind.HasValue(), ofKey(err, x.key)
}

package lease

import (
	"bytes"
	"cmp"
	"context"
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// progress is how far the revocation of a lease has come.
type progress struct {
	after  []byte // the last attachment that is gone; nil: it begins
	damage error  // the lease is not gone while it may have keys that cannot be read
}

// errGoesOn says that a lease has more keys than one commit deletes.
var errGoesOn = errors.New("the revocation goes on")

// revoke deletes a lease whose revocation has begun, and what is attached to it, in one commit, and returns its epoch. If there are more attachments than
// one commit should have, it deletes some of them and returns errGoesOn: then it goes on from there when it is called again, in small commits.
//
// The mark in memory is set. What has held the lease's latch before may not have seen it, so revoke waits until all that is
// visible: from then on, no attachment is added.
func (m *Manager) revoke(ctx context.Context, x *mvcc.Session, e *entry) (keys.Epoch, error) {
	p, keysMax := e.progress, m.options.StepKeys
	e.progress = progress{} // after an error it begins again
	if p.after != nil {
		keysMax = min(keysMax, longStepKeys)
	} else if err := x.AwaitCommitted(ctx, leaseLatch(e.id)); err != nil {
		return 0, err
	}
	step, more, err := m.attachments(ctx, x, e.id, p.after, keysMax, m.options.StepBytes, func(_, _ []byte, err error) {
		if !mvcc.HidesOnlyBefore(err, e.since) {
			p.damage = cmp.Or(p.damage, err)
		}
	})
	if err != nil {
		return 0, err
	}
	if more && len(step) > longStepKeys {
		step = step[:longStepKeys]
	}
	epoch, hidden, err := m.commitRevocation(ctx, x, e, step, !more && p.damage == nil)
	if err != nil {
		return 0, err
	}
	if p.damage = cmp.Or(p.damage, hidden); !more {
		return epoch, p.damage
	}
	if err := m.store.Wait(ctx, epoch, mvcc.DurabilityAsync); err != nil { // for the next snapshot
		return 0, err
	}
	p.after = step[len(step)-1]
	e.progress = p
	return 0, errGoesOn
}

// attachments are keys of attachments of a lease, in order, after a key, of a new snapshot. More says that there are others. It
// goes on after damaged pages if hidden is not nil, see Session.ScanReadable.
func (m *Manager) attachments(
	ctx context.Context, x *mvcc.Session, id ID, after []byte, keysMax, bytesMax int, hidden func(lower, upper []byte, err error),
) (found [][]byte, more bool, err error) {
	lower, upper := attachmentBounds(id)
	if after != nil {
		lower = append(bytes.Clone(after), 0)
	}
	size := 0
	err = x.ScanReadable(ctx, lower, upper, func(key, _ []byte, _ keys.Epoch) bool {
		if more = len(found) == keysMax || size >= bytesMax; more {
			return false
		}
		found = append(found, bytes.Clone(key))
		size += 2 * len(key) // the attachment, and the key itself
		return true
	}, hidden)
	return found, more, err
}

// commitRevocation deletes attachments, and those of their keys that belong to the lease; with the last ones the lease. Keys
// that damaged pages hide stay with their attachments, and then the lease does, too; the damage is returned.
func (m *Manager) commitRevocation(
	ctx context.Context, x *mvcc.Session, e *entry, step [][]byte, last bool,
) (epoch keys.Epoch, damage, err error) {
	var w mvcc.Write
	w.Durability, w.Origin = mvcc.DurabilitySync, batch.OriginLease
	w.SetOwn()
	w.Latch(leaseLatch(e.id))
	for _, attachment := range step {
		w.Latch(attached(attachment))
	}
	var deleted int
	var locks [][]byte
	w.Under(func(l *mvcc.Latched) error {
		deleted, locks, damage = 0, nil, nil
		for _, attachment := range step {
			internal := attached(attachment)
			n, err := l.Newest(internal)
			if errors.Is(err, mvcc.ErrDamaged) {
				damage = cmp.Or(damage, err)
				continue
			}
			if err != nil {
				return err
			}
			if belongs(&n, e.id) {
				l.Write().Batch.Delete(keys.SpaceOf(internal), keys.User(internal))
				deleted++
				if name, ok := lockName(internal); ok {
					locks = append(locks, name)
				}
			}
			l.Write().Batch.DeleteRecord(keys.SpaceSystem, attachment)
		}
		m.endOrMark(l.Write(), e, last && damage == nil)
		return nil
	})
	if epoch, err = x.Commit(ctx, &w); err != nil {
		return 0, nil, err
	}
	m.counters.deleted.Add(uint64(deleted))
	for _, name := range locks {
		m.locks.changed(name, Held{}, epoch)
	}
	return epoch, damage, nil
}

// endOrMark deletes the lease, or stores that its revocation has begun.
func (m *Manager) endOrMark(w *mvcc.Write, e *entry, last bool) {
	key := leaseKey(e.id)
	if last {
		w.Batch.DeleteRecord(keys.SpaceSystem, key)
		return
	}
	r := e.record
	r.revoking = true
	w.Batch.SetRecord(keys.SpaceSystem, key, r.encode())
}

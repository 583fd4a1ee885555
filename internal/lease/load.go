package lease

import (
	"bytes"
	"cmp"
	"container/heap"
	"context"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// unreadLeases are leases of which damaged pages hide the records. They cannot be kept alive, and do not end by themselves: how
// long they live is not known, and no lease ends early. What is attached to them stays until they are revoked, or granted again
// with their ids. The fields are constant after Open.
type unreadLeases struct {
	ranges []unreadRange
	some   []ID  // that have attachments: the first few
	err    error // the first damage
}

// unreadRange is a range of ids; to is not in it, and zero is no bound.
type unreadRange struct{ from, to ID }

// unreadShown is how many ids of unread leases are looked for.
const unreadShown = 10

func (u *unreadLeases) has(id ID) bool {
	for _, r := range u.ranges {
		if r.from <= id && (r.to == 0 || id < r.to) {
			return true
		}
	}
	return false
}

// add notes a range of keys of leases whose records cannot be read.
func (u *unreadLeases) add(lower, upper []byte, err error) {
	u.ranges = append(u.ranges, unreadRange{from: leaseFrom(lower), to: leaseFrom(upper)})
	if u.err == nil {
		u.err = err
	}
}

// leaseFrom is the smallest id of a lease with a key that is not less than key; zero if there is none, or all have.
func leaseFrom(key []byte) ID {
	if len(key) == 0 || key[0] != keys.SystemLease {
		return 0
	}
	var id [1 + 8]byte
	copy(id[:], key)
	from := leaseOf(id[:])
	if len(key) > len(id) {
		from++
	}
	return from
}

// load gives every lease at least what was left of it: what is recorded, or the whole TTL. A record that cannot be read keeps no
// other lease, and no store, from being opened.
func (m *Manager) load(ctx context.Context) error {
	x, err := m.store.Session()
	if err != nil {
		return err
	}
	defer x.Close()
	err = x.ScanReadable(ctx, leasesLower, leasesUpper, func(key, value []byte, _ keys.Epoch) bool {
		var r record
		if err := r.decode(value); err != nil {
			m.unread.add(key, append(bytes.Clone(key), 0), fmt.Errorf("lease %x: %w", key, err))
		} else {
			m.enter(leaseOf(key), &r)
		}
		return true
	}, m.unread.add)
	if err != nil || len(m.unread.ranges) == 0 {
		return err
	}
	return m.findUnread(ctx, x)
}

// enter begins the life of a lease that was stored.
func (m *Manager) enter(id ID, r *record) {
	now := m.options.Elapsed()
	e := &entry{id: id, recorded: r.remaining > 0, index: notScheduled}
	e.deadline = now + r.ttl + m.options.Grace
	if e.recorded {
		e.deadline = now + r.remaining + m.options.Grace
	}
	r.remaining = 0 // else the next keep-alive would write it again
	e.record, e.at = *r, e.deadline
	m.leases[e.id] = e
	if r.revoking {
		e.revoking = true
		m.asked = append(m.asked, e)
	} else {
		heap.Push(&m.deadlines, e)
	}
}

// findUnread looks for attachments of unread leases, so that an operator learns their ids.
func (m *Manager) findUnread(ctx context.Context, x *mvcc.Session) error {
	upper := []byte{keys.SystemAttachment + 1}
	for next, more := ID(0), true; more && len(m.unread.some) < unreadShown; {
		more = false
		lower, _ := attachmentBounds(next)
		err := x.ScanReadable(ctx, lower, upper, func(key, _ []byte, _ keys.Epoch) bool {
			id := leaseOf(key[:min(len(key), 9)])
			if m.unread.has(id) && m.leases[id] == nil {
				m.unread.some = append(m.unread.some, id)
			}
			next, more = id+1, id+1 != 0
			return false
		}, func([]byte, []byte, error) {})
		if err != nil {
			return err
		}
	}
	return nil
}

// Damage says what damaged pages do to leases. Err is the first damage that is known; nil if there is none.
type Damage struct {
	Stuck  int  // leases that cannot end, because pages hide keys of theirs
	Hidden []ID // leases with keys or locks of which the records cannot be read: the first few
	Err    error
}

// Damage is what is known of now.
func (m *Manager) Damage() Damage {
	m.mu.RLock()
	defer m.mu.RUnlock()
	out := Damage{Hidden: m.unread.some, Err: m.unread.err}
	for _, e := range slices.Concat(m.asked, m.busy) {
		if e.damage != nil {
			out.Stuck, out.Err = out.Stuck+1, cmp.Or(out.Err, e.damage)
		}
	}
	return out
}

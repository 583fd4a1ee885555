package lease

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// unreadLeases are leases of which damaged pages hide the records. They cannot be kept alive, and do not end by themselves: how
// long they live is not known, and no lease ends early. What is attached to them stays until they are revoked, or granted again
// with their ids, or until the pages can be read: see readUnread. Guarded by Manager.mu.
type unreadLeases struct {
	ranges []unreadRange
	some   []ID  // that have attachments: the first few
	err    error // the first damage
}

// unreadRange is a range of ids; to is not in it, and zero is no bound.
type unreadRange struct{ from, to ID }

// unreadShown is how many ids of unread leases are looked for.
const unreadShown = 10

// hasUnread reports whether records of leases could not be read.
func (m *Manager) hasUnread() bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return len(m.unread.ranges) > 0
}

// findRevocable is find, and returns nil for a lease of which the record could not be read. It looks for both at once: readUnread enters the lease, and then
// forgets that it could not be read, at any time.
func (m *Manager) findRevocable(id ID) (*entry, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if e := m.leases[id]; e != nil || m.unread.has(id) {
		return e, nil
	}
	return nil, &Error{ID: id, Err: ErrNotFound}
}

// Unread reports whether an id may be that of a lease of which the record could not be read: a grant would take over what is attached to it.
func (m *Manager) Unread(id ID) bool {
	m.mu.RLock()
	defer m.mu.RUnlock()
	return m.leases[id] == nil && m.unread.has(id)
}

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
	if err = m.unread.scan(ctx, x, leasesLower, leasesUpper, m.enter); err != nil || len(m.unread.ranges) == 0 {
		return err
	}
	m.unread.some, err = m.findUnread(ctx, x, &m.unread)
	return err
}

// scan calls visit for each lease with a record in a range of keys, and notes what cannot be read of it.
func (u *unreadLeases) scan(ctx context.Context, x *mvcc.Session, lower, upper []byte, visit func(ID, *record)) error {
	return x.ScanReadable(ctx, lower, upper, func(key, value []byte, _ keys.Epoch) bool {
		var r record
		if err := r.decode(value); err != nil {
			u.add(key, append(bytes.Clone(key), 0), fmt.Errorf("lease %x: %w", key, err))
		} else {
			visit(leaseOf(key), &r)
		}
		return true
	}, u.add)
}

// unreadEvery is the time between two attempts to read the records of leases that could not be read.
const unreadEvery = 10 * time.Second

// readUnread reads again what could not be read: a device may fail for a while. The lives of the leases that it finds begin then. After an error it may be
// called again.
func (m *Manager) readUnread(ctx context.Context) error {
	m.mu.RLock()
	ranges := m.unread.ranges
	m.mu.RUnlock()
	x, still, found := m.sessions.reader, unreadLeases{}, []ID(nil)
	defer x.Trim()
	for _, r := range ranges {
		upper := leasesUpper
		if r.to != 0 {
			upper = leaseKey(r.to)
		}
		if err := still.scan(ctx, x, leaseKey(r.from), upper, func(id ID, _ *record) {
			if _, err := m.find(id); err != nil {
				found = append(found, id)
			}
		}); err != nil {
			return err
		}
	}
	if len(found) == 0 && slices.Equal(still.ranges, ranges) {
		return nil
	}
	again := false
	for _, id := range found {
		err := m.enterUnread(ctx, x, id)
		if again = again || errors.Is(err, errGranting); err != nil && !errors.Is(err, errGranting) {
			return err
		}
	}
	if again {
		return nil // the ranges stay as they are
	}
	some, err := m.findUnread(ctx, x, &still)
	if err != nil {
		return err
	}
	still.some = some
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unread = still
	return nil
}

// enterUnread begins the life of a lease that could not be read before, unless it has been revoked or granted again since: under the latch of its record,
// which a grant and a revocation change.
func (m *Manager) enterUnread(ctx context.Context, x *mvcc.Session, id ID) error {
	var w mvcc.Write
	w.SetOwn()
	key := leaseLatch(id)
	w.Latch(key)
	w.Under(func(l *mvcc.Latched) error {
		n, err := l.Newest(key)
		if err != nil || !n.Found {
			return err
		}
		var r record
		if err := r.decode(n.Value); err != nil {
			return err
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.granting[id] != nil {
			return errGranting
		}
		if m.leases[id] == nil {
			m.enter(id, &r)
			m.wakeUp()
		}
		return nil
	})
	_, err := x.Commit(ctx, &w)
	return err
}

// errGranting says that a lease is granted at this moment: it is looked for later.
var errGranting = errors.New("a lease that could not be read is being granted")

// enter begins the life of a lease that was stored. After Open, Manager.mu is held.
func (m *Manager) enter(id ID, r *record) {
	now := m.options.Elapsed()
	e := &entry{id: id, recorded: r.remaining > 0, index: notScheduled}
	e.deadline = now + r.ttl + m.options.Grace
	if e.recorded {
		e.deadline = now + r.remaining + m.options.Grace
	}
	r.remaining = 0 // else the next keep-alive would write it again
	e.record, e.revoking = *r, r.revoking
	m.leases[e.id] = e
	if e.revoking {
		m.schedule(e, now)
	} else {
		m.schedule(e, e.deadline)
	}
}

// findUnread looks for attachments of unread leases, so that an operator learns their ids.
func (m *Manager) findUnread(ctx context.Context, x *mvcc.Session, unread *unreadLeases) (some []ID, _ error) {
	upper := []byte{keys.SystemAttachment + 1}
	for _, r := range unread.ranges { // of all other leases there may be a million
		for next, more := r.from, true; more && len(some) < unreadShown; {
			more = false
			lower, _ := attachmentBounds(next)
			err := x.ScanReadable(ctx, lower, upper, func(key, _ []byte, _ keys.Epoch) bool {
				id := leaseOf(key[:min(len(key), 9)])
				if r.to != 0 && id >= r.to {
					return false
				}
				if _, err := m.find(id); err != nil {
					some = append(some, id)
				}
				next, more = id+1, id+1 != 0
				return false
			}, func([]byte, []byte, error) {})
			if err != nil {
				return nil, err
			}
		}
	}
	return some, nil
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
	first := ID(math.MaxUint64)
	out.Stuck = len(m.tried.damaged)
	for e, damage := range m.tried.damaged {
		if m.unread.err == nil && e.id <= first {
			first, out.Err = e.id, damage
		}
	}
	return out
}

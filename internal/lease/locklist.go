package lease

import (
	"context"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
)

// WaitingShown is how many of the requests that wait for a lock are named.
const WaitingShown = 16

// LockInfo describes a lock that is held, or that requests wait for.
type LockInfo struct {
	Name    []byte
	Held    Held
	Waiters int
	Waiting []ID // the leases of the first waiters, in the order of the queue
}

// ListLocks describes up to limit locks with names from lower up to but not including upper, in their order, but not many more bytes
// than keysBytesMax; an empty upper is no bound. More says that there may be others. Each lock is read by itself, under its latch, so
// the list is not that of one moment: a lock that was released meanwhile has no holder. The answer may be sent once await is durable.
func (m *Manager) ListLocks(ctx context.Context, lower, upper []byte, limit int) (found []LockInfo, more bool, await keys.Epoch, err error) {
	x, err := m.store.SessionOf(ctx)
	if err != nil {
		return nil, false, 0, err
	}
	defer x.Close()
	end := []byte{keys.SystemLock + 1}
	if len(upper) > 0 {
		end = lockKey(upper)
	}
	names := m.locks.waitedFor(string(lower), string(upper))
	last := "" // where the scan was ended, if it was: names after it belong to the next list
	held, size := 0, 0
	err = x.ScanSystem(ctx, lockKey(lower), end, func(key, _ []byte, _ keys.Epoch) bool {
		name := string(key[1:])
		names = append(names, name)
		if held, size = held+1, size+len(name); held > limit || size >= keysBytesMax {
			last = name
		}
		return last == ""
	})
	if err != nil {
		return nil, false, 0, err
	}
	slices.Sort(names)
	names = slices.Compact(names)
	if last != "" {
		names = slices.DeleteFunc(names, func(name string) bool { return name > last })
	}
	size = 0
	for i, name := range names {
		if i%keysPerTurn == keysPerTurn-1 { // what is in memory is read without a wait
			m.options.yield()
		}
		if len(found) == limit || size >= keysBytesMax {
			return found, true, x.Await(), nil
		}
		info := LockInfo{Name: []byte(name)}
		n, err := x.NewestVersion(ctx, keys.Append(nil, keys.SpaceSystem, lockKey(info.Name)))
		if err != nil {
			return nil, false, 0, err
		}
		if n.Found {
			info.Held = Held{Token: n.Epoch, Lease: ID(n.Metadata.Lease), Value: n.Value}
		}
		info.Waiters, info.Waiting = m.locks.waiting(name)
		found = append(found, info)
		size += len(name) + len(n.Value)
	}
	return found, last != "", x.Await(), nil
}

// waitedFor are the names of locks in a range that requests wait for. They are those of the table, not copied: they may be many, and
// long.
func (t *lockTable) waitedFor(lower, upper string) (names []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, q := range t.queues {
		if q.waiters.Len() > 0 && name >= lower && (upper == "" || name < upper) {
			names = append(names, name)
		}
	}
	return names
}

// waiting is how many requests wait for a lock, and the leases of the first ones.
func (t *lockTable) waiting(name string) (count int, first []ID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	q := t.queues[name]
	if q == nil {
		return 0, nil
	}
	for at := q.waiters.Front(); at != nil && len(first) < WaitingShown; at = at.Next() {
		first = append(first, waiterAt(at).attempt.lease)
	}
	return q.waiters.Len(), first
}

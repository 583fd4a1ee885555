package lease

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// KeysMax is how many keys are attached to a lease at most.
const KeysMax = 1_000_000

// ErrTooManyKeys means that a lease has as many keys as it may have.
var ErrTooManyKeys = fmt.Errorf("the lease has too many keys, or has had them lately: %w", mvcc.ErrLeaseFull)

// attachedKeys bounds from above how many attachments a lease has. A put with the lease adds one, although its key may be attached
// already, and its commit may fail. When half of the room is used, the attachments are counted. Those that are stale, because their
// keys were deleted or put again without the lease, are deleted on this occasion: otherwise a lease to which other keys are attached all
// the time would be full one day. After a start a lease counts from zero, until it is counted after the first put with it.
type attachedKeys struct {
	most    int  // attachments
	since   int  // of these, the ones since the count under way began
	countAt int  // they are counted when there may be so many
	counted bool // a count is under way, or asked for
}

// counting counts the attachments of leases, one lease at a time. It rests four times as long as it works, but for countRestMax.
type counting struct {
	session *mvcc.Session // not counted by the limit, as that of the revoker
	wake    chan struct{} // holds a token if a lease is in the line

	mu   sync.Mutex // a leaf
	line []*entry
}

const countRestMax = 2 * time.Second

// admitKeysLocked admits so many attachments, or refuses them if there would be too many.
func (m *Manager) admitKeysLocked(e *entry, n int) error {
	a := &e.attached
	full := a.most+n > m.options.Keys && n > 0
	if !full {
		a.most += n
		a.since += n
	}
	if n > 0 && (full || a.most >= a.countAt) && !a.counted {
		a.counted = true
		m.counting.add(e)
	}
	if full {
		return &Error{ID: e.id, Err: ErrTooManyKeys}
	}
	return nil
}

// room is how many keys admit would attach to a lease now, or more if it would refuse any.
func (m *Manager) room(id ID) int {
	e, err := m.find(id)
	if err != nil {
		return m.options.Keys
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return m.options.Keys - e.attached.most
}

func (c *counting) add(e *entry) {
	c.mu.Lock()
	c.line = append(c.line, e)
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *counting) next() *entry {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.line) == 0 {
		c.line = nil
		return nil
	}
	e := c.line[0]
	c.line = c.line[1:]
	return e
}

// runCounts counts the attachments of leases until ctx ends.
func (m *Manager) runCounts(ctx context.Context) {
	for ctx.Err() == nil {
		e := m.counting.next()
		if e == nil {
			select {
			case <-m.counting.wake:
			case <-ctx.Done():
			}
			continue
		}
		began := time.Now()
		if err := m.count(ctx, m.counting.session, e); err != nil {
			m.counters.failures.Add(1) // the next put with the lease asks again
		}
		pause := time.NewTimer(min(4*time.Since(began), countRestMax))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
		}
	}
}

// count counts the attachments of a lease, and deletes stale ones. Puts go on meanwhile: they count as well. Those that were admitted
// before are waited for, so that the scan sees their attachments.
func (m *Manager) count(ctx context.Context, x *mvcc.Session, e *entry) error {
	defer x.Trim()
	e.mu.Lock()
	e.attached.since = 0
	e.mu.Unlock()
	n := 0
	err := x.AwaitCommitted(ctx, leaseLatch(e.id))
	for after, more := []byte(nil), true; more && err == nil; {
		var step [][]byte
		if step, more, err = m.attachments(ctx, x, e.id, after, longStepKeys, m.options.StepBytes, func(_, _ []byte, _ error) {}); len(step) > 0 && err == nil {
			after = step[len(step)-1]
			n += len(step)
			var stale [][]byte
			deleted := 0
			if stale, err = m.stale(ctx, x, e, step); err == nil && len(stale) > 0 {
				deleted, err = m.deleteStale(ctx, x, e, stale)
			}
			n -= deleted
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	a := &e.attached
	if a.counted = false; err == nil {
		a.most = n + a.since
		a.countAt = a.most + max((m.options.Keys-a.most)/2, 1)
	}
	return err
}

// stale are those attachments whose keys do not belong to the lease any more. What cannot be read counts as belonging to it.
func (m *Manager) stale(ctx context.Context, x *mvcc.Session, e *entry, step [][]byte) (list [][]byte, err error) {
	for _, attachment := range step {
		n, err := x.NewestVersion(ctx, attached(attachment))
		if err != nil && !errors.Is(err, mvcc.ErrDamaged) {
			return nil, err
		}
		if err == nil && !belongs(&n, e.id) {
			list = append(list, attachment)
		}
	}
	return list, nil
}

// deleteStale deletes those of some attachments that are still stale, and returns how many.
func (m *Manager) deleteStale(ctx context.Context, x *mvcc.Session, e *entry, stale [][]byte) (deleted int, err error) {
	var w mvcc.Write
	w.Durability, w.Origin = mvcc.DurabilityAsync, batch.OriginCleanup
	w.SetOwn()
	for _, attachment := range stale {
		w.Latch(attached(attachment))
	}
	w.Under(func(l *mvcc.Latched) error {
		deleted = 0
		for _, attachment := range stale { // again: it may have been put with the lease meanwhile
			n, err := l.Newest(attached(attachment))
			if err != nil && !errors.Is(err, mvcc.ErrDamaged) {
				return err
			}
			if err == nil && !belongs(&n, e.id) {
				l.Write().Batch.DeleteRecord(keys.SpaceSystem, attachment)
				deleted++
			}
		}
		return nil
	})
	epoch, err := x.Commit(ctx, &w)
	if err != nil || epoch == 0 {
		return deleted, err
	}
	return deleted, m.store.Wait(ctx, epoch, mvcc.DurabilityAsync)
}

// belongs reports whether the newest version of a key names a lease.
func belongs(n *mvcc.Newest, id ID) bool { return n.Found && n.Metadata.Lease == uint64(id) }

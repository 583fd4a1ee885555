package mvcc

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// A change of a hold keeps versions at once, and is told of when its record is durable: before that, a crash could take it back.

// untoldHold is a hold whose record may not be durable yet. Guarded by timeline.mu.
type untoldHold struct {
	deadline uint64     // that is told; zero: nothing is told of the hold
	epoch    keys.Epoch // of the commit of the record; zero: it is not known yet
}

// toldLocked is a hold as it is told, while an epoch is durable.
func (t *timeline) toldLocked(h *Hold, durable keys.Epoch) Hold {
	told := *h
	if u, untold := t.untold[h.ID]; untold && (u.epoch == 0 || u.epoch > durable) {
		told.Deadline = u.deadline
	}
	return told
}

// Holds lists the holds, the oldest first.
func (s *Store) Holds() []Hold {
	t, durable := &s.timeline, s.Durable()
	t.mu.Lock()
	defer t.mu.Unlock()
	var list []Hold
	for _, h := range t.holds {
		if told := t.toldLocked(h, durable); told.Deadline != 0 { // else its request has failed, or is not answered yet
			list = append(list, told)
		}
	}
	slices.SortFunc(list, func(a, b Hold) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// RenewHold moves the deadline of a hold. An earlier deadline than before is not taken.
func (x *Session) RenewHold(ctx context.Context, id uint64, ttl time.Duration) (Hold, error) {
	s, t := x.store, &x.store.timeline
	if err := t.takeTurn(ctx); err != nil {
		return Hold{}, err
	}
	defer t.endTurn()
	t.mu.Lock()
	h := t.holds[id]
	if h == nil || h.Deadline <= endedDeadline {
		t.mu.Unlock()
		return Hold{}, ErrNoHold
	}
	before := *h
	earlier, untold := t.untold[id] // of a renewal that was given up
	now := untoldHold{deadline: t.toldLocked(h, s.Durable()).Deadline}
	t.untold[id] = now
	h.Deadline = max(h.Deadline, s.holdDeadline(ttl))
	renewed := *h
	t.mu.Unlock()
	epoch, err := x.recordHold(ctx, id, renewed.value())
	t.mu.Lock()
	defer t.mu.Unlock()
	switch now.epoch = epoch; {
	case err == nil:
		delete(t.untold, id)
	case epoch != 0: // it will be durable
		t.untold[id] = now
	case untold:
		h.Deadline, t.untold[id] = before.Deadline, earlier
	default:
		h.Deadline = before.Deadline
		delete(t.untold, id)
	}
	return renewed, err
}

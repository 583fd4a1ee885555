package mvcc

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// Hold keeps all versions from an epoch on until a deadline, for an owner that renews it. It survives restarts.
type Hold struct {
	ID       uint64
	Owner    string
	Epoch    keys.Epoch
	Deadline uint64 // milliseconds since 1970, by the store's clock
}

// Limits of holds.
const (
	HoldsMax      = 1024
	HoldOwnerMax  = 128
	HoldTimeMax   = 30 * 24 * time.Hour
	holdValueSize = 16
	endedHoldsMax = 32 // are remembered, for the server's log
	// endedDeadline is the deadline of a hold that has ended although its record may still be there; see expireHold and forget.
	endedDeadline = 1
)

var (
	// ErrNoHold means that no hold has the id.
	ErrNoHold = errors.New("mvcc: there is no such hold")
	// ErrTooManyHolds means that HoldsMax exist.
	ErrTooManyHolds = errors.New("mvcc: too many holds")
)

func holdKey(id uint64) []byte {
	return binary.BigEndian.AppendUint64([]byte{keys.SystemHold}, id)
}

func (h *Hold) value() []byte {
	v := binary.LittleEndian.AppendUint64(nil, uint64(h.Epoch))
	return append(binary.LittleEndian.AppendUint64(v, h.Deadline), h.Owner...)
}

// endedHoldsKey is the key of the record of the epoch up to which the records of holds mean nothing; see endHidden.
var endedHoldsKey = []byte{keys.SystemHold}

// openHolds reads the records. Those that damaged pages hide are of holds that have ended now; all have if it is hidden which ended before.
func (t *timeline) openHolds(ctx context.Context, x *Session) error {
	visible, ended := x.store.Visible(), keys.Epoch(0)
	visit := func(key, value []byte, epoch keys.Epoch) bool {
		switch {
		case string(key) == string(endedHoldsKey) && len(value) == 8: // it is before all others
			ended = keys.Epoch(binary.LittleEndian.Uint64(value))
		case len(key) == 9 && len(value) >= holdValueSize:
			h := &Hold{ID: binary.BigEndian.Uint64(key[1:]), Owner: string(value[holdValueSize:])}
			h.Epoch, h.Deadline = keys.Epoch(binary.LittleEndian.Uint64(value)), binary.LittleEndian.Uint64(value[8:])
			if t.holds[h.ID] = h; epoch <= ended {
				h.forget(visible)
			}
		}
		return true
	}
	unknown := false // which have ended
	err := x.ScanReadable(ctx, endedHoldsKey, []byte{keys.SystemHold + 1}, visit, func(lower, _ []byte, _ error) {
		t.hidden, unknown = true, unknown || bytes.Equal(lower, endedHoldsKey)
	})
	if errors.Is(err, storage.ErrDamaged) {
		t.hidden, unknown, err = true, true, nil
	}
	if unknown && ended == 0 {
		for _, h := range t.holds {
			h.forget(visible)
		}
	}
	return err
}

// forget makes a hold one that has ended long ago.
func (h *Hold) forget(visible keys.Epoch) { h.Epoch, h.Deadline = visible, endedDeadline }

// endHidden records that the holds have ended whose records damaged pages hid at the start: merges drop from now on what they kept, and a
// later start may read the records, after an inner node was rebuilt for instance. The others are written anew, after that.
func (s *Store) endHidden(ctx context.Context, x *Session) error {
	t := &s.timeline
	if !t.hidden || s.FeatureLevel() < keys.FeatureLevelHistory {
		return nil
	}
	if err := t.takeTurn(ctx); err != nil {
		return err
	}
	defer t.endTurn()
	w := &Write{Durability: DurabilitySync, Origin: batch.OriginCleanup}
	w.SetOwn()
	w.Batch.SetRecord(keys.SpaceSystem, endedHoldsKey, binary.LittleEndian.AppendUint64(nil, uint64(s.recovery.Next-1)))
	for id, value := range t.holdRecords() {
		w.Batch.SetRecord(keys.SpaceSystem, holdKey(id), value)
	}
	if _, err := x.commitDurably(ctx, w); err != nil {
		return err
	}
	t.hidden = false
	s.keepHidden()
	return nil
}

// holdRecords are the records of the holds.
func (t *timeline) holdRecords() map[uint64][]byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	records := map[uint64][]byte{}
	for id, h := range t.holds {
		records[id] = h.value()
	}
	return records
}

// heldLocked is the smallest epoch that is held, or MaxEpoch.
func (t *timeline) heldLocked() keys.Epoch {
	held := keys.MaxEpoch
	for _, h := range t.holds {
		held = min(held, h.Epoch)
	}
	for _, e := range t.reads {
		held = min(held, e)
	}
	return held
}

// takeTurn waits until no other goroutine changes the record of a hold: the records have the order of the changes in memory.
func (t *timeline) takeTurn(ctx context.Context) error {
	select {
	case t.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (t *timeline) endTurn() { <-t.turn }

// expiredHolds are the ids of the holds whose deadline has passed, in milliseconds since 1970.
func (t *timeline) expiredHolds(now uint64) (ids []uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for id, h := range t.holds {
		if h.Deadline <= now {
			ids = append(ids, id)
		}
	}
	return ids
}

// endHolds ends the holds whose deadline has passed.
func (s *Store) endHolds(ctx context.Context, x *Session) error {
	t := &s.timeline
	if len(t.expiredHolds(math.MaxUint64)) == 0 {
		return nil // there is none: an idle store does not keep the clock awake
	}
	now := s.clock.Now() / 1000
	if len(t.expiredHolds(now)) == 0 {
		return nil
	}
	if err := t.takeTurn(ctx); err != nil {
		return err
	}
	defer t.endTurn()
	for _, id := range t.expiredHolds(now) { // again: one of them may have been renewed
		if _, err := x.recordHold(ctx, id, nil); err != nil {
			return err
		}
		t.expire(id)
	}
	return nil
}

// expire ends a hold whose deadline has passed. A hold of which the request failed is not worth a line in the log.
func (t *timeline) expire(id uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if h := t.holds[id]; h.Deadline != 0 {
		t.expired++
		t.ended = append(t.ended, *h)
		t.ended = slices.Delete(t.ended, 0, max(0, len(t.ended)-endedHoldsMax))
	}
	delete(t.holds, id)
	delete(t.untold, id)
}

// EndedHolds are the holds that ended at their deadline after the first n did, as far as they are remembered, and how many
// ended in all.
func (s *Store) EndedHolds(n uint64) (list []Hold, total uint64) {
	t := &s.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.ended[max(0, len(t.ended)-int(min(t.expired-min(n, t.expired), endedHoldsMax))):]), t.expired
}

// keepable is nil if all versions from an epoch on are still there. The caller has the collector's mutex.
func (s *Store) keepable(e keys.Epoch) error {
	if e < s.registry.LowWatermark() || e > s.Visible() {
		return s.snapshotGone(e)
	}
	return s.refuseRemoved(e)
}

// hold registers a hold, if all versions from its epoch on are still there. The collector does not run meanwhile.
func (s *Store) hold(h *Hold) error {
	c, t := s.collector, &s.timeline
	c.mu.Lock()
	defer c.mu.Unlock()
	if h.Epoch == 0 {
		h.Epoch = s.Visible() // here, because the collector moves the low watermark up to it at any moment
	}
	if err := s.keepable(h.Epoch); err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.holds) >= HoldsMax {
		return ErrTooManyHolds
	}
	for h.ID = s.clock.Now(); t.holds[h.ID] != nil; {
		h.ID++ // ids are times, so that none is used again after a restart
	}
	t.holds[h.ID], t.untold[h.ID] = h, untoldHold{}
	return nil
}

// expireHold makes endHolds end a hold of which it is not known whether it has a record: without the hold, the record would
// say after a restart that versions are kept that were dropped.
func (t *timeline) expireHold(h *Hold) {
	t.mu.Lock()
	h.Deadline = 0
	t.mu.Unlock()
}

// keepVersions keeps all versions from an epoch on, the oldest possible for zero, until endKeeping: while the session reads them.
func (x *Session) keepVersions(from keys.Epoch) (keys.Epoch, error) {
	s := x.store
	c, t := s.collector, &s.timeline
	c.mu.Lock()
	defer c.mu.Unlock()
	if from == 0 {
		from = s.registry.LowWatermark()
	} else if err := s.keepable(from); err != nil {
		return 0, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reads[x] = from
	return from, nil
}

func (x *Session) endKeeping() {
	t := &x.store.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.reads, x)
}

func (s *Store) unhold(id uint64) {
	t := &s.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.holds, id)
	delete(t.untold, id)
}

// recordHold writes the record of a hold, or removes it without a value. Without a commit, its epoch is zero.
func (x *Session) recordHold(ctx context.Context, id uint64, value []byte) (keys.Epoch, error) {
	w := &Write{Durability: DurabilitySync}
	w.SetOwn()
	if value == nil {
		w.Origin = batch.OriginCleanup
		w.Batch.DeleteRecord(keys.SpaceSystem, holdKey(id))
	} else {
		w.Batch.SetRecord(keys.SpaceSystem, holdKey(id), value)
	}
	return x.commitDurably(ctx, w)
}

// TakeHold keeps all versions from an epoch on, the newest epoch for zero, for a time. It is durable when it returns.
func (x *Session) TakeHold(ctx context.Context, owner string, at keys.Epoch, ttl time.Duration) (Hold, error) {
	s := x.store
	if err := s.RequireFeatureLevel(keys.FeatureLevelHistory, "holds"); err != nil {
		return Hold{}, err
	}
	if len(owner) > HoldOwnerMax {
		return Hold{}, &LimitError{What: "owner bytes", Limit: HoldOwnerMax, Got: len(owner)}
	}
	if err := s.timeline.takeTurn(ctx); err != nil {
		return Hold{}, err
	}
	defer s.timeline.endTurn()
	h := &Hold{Owner: owner, Epoch: at, Deadline: s.holdDeadline(ttl)}
	if err := s.hold(h); err != nil {
		return Hold{}, err
	}
	if _, err := x.recordHold(ctx, h.ID, h.value()); err != nil {
		s.timeline.expireHold(h)
		return Hold{}, err
	}
	s.timeline.mu.Lock()
	defer s.timeline.mu.Unlock()
	delete(s.timeline.untold, h.ID)
	return *h, nil
}

func (s *Store) holdDeadline(ttl time.Duration) uint64 {
	return s.clock.Now()/1000 + uint64(min(max(ttl, time.Second), HoldTimeMax).Milliseconds())
}

// EndHold ends a hold before its deadline, and returns it.
func (x *Session) EndHold(ctx context.Context, id uint64) (Hold, error) {
	if err := x.store.timeline.takeTurn(ctx); err != nil {
		return Hold{}, err
	}
	defer x.store.timeline.endTurn()
	list := x.store.Holds()
	i := slices.IndexFunc(list, func(h Hold) bool { return h.ID == id })
	if i < 0 {
		return Hold{}, ErrNoHold
	}
	if _, err := x.recordHold(ctx, id, nil); err != nil {
		return Hold{}, err
	}
	x.store.unhold(id)
	return list[i], nil
}

package mvcc

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// removedMax bounds the records of removed epochs. With more, the oldest become one, which has the commits between them as well: a
// watch that comes back to one of those, and a read at it, is refused needlessly.
const removedMax = 1000

// removedMany is how many records that are not needed any more make it worth while to remove them.
const removedMany = 100

// openRemoved reads the records of the epochs that clients may have seen and that do not exist any more, because a repair of the log
// removed them or a crash lost them. It adds those that recovery has met and not recorded itself: their skip records are in the log for a while only. Without
// them, the state at such an epoch would be another one than that which clients have seen, and the difference since it would leave out
// what was undone.
func (s *Store) openRemoved(ctx context.Context) error {
	known := map[keys.Epoch]keys.Epoch{} // from the last to the first epoch
	err := s.probe.ScanSystem(ctx, []byte{keys.SystemRemoved}, []byte{keys.SystemRemoved + 1}, func(key, value []byte, _ keys.Epoch) bool {
		if len(key) == 9 && len(value) == 8 {
			known[keys.Epoch(binary.BigEndian.Uint64(key[1:]))] = keys.Epoch(binary.LittleEndian.Uint64(value))
		}
		return true
	})
	if err != nil && !errors.Is(err, storage.ErrDamaged) { // a damaged page must not keep the store from starting
		return fmt.Errorf("the records of repairs of the log: %w", err)
	}
	retained := s.timeline.retained()
	if s.timeline.hides() { // an earlier epoch may be readable after the next start
		retained = 0
	}
	s.timeline.removed = removedRanges(known, s.recovery.Skipped, retained)
	s.timeline.unrecorded = changedRanges(known, s.timeline.removed)
	s.timeline.forget(s.Visible())
	s.keepHidden()
	if err != nil { // every epoch may be one of those that the page hides. That ends no retention: a later start may read it
		s.timeline.removed = []keys.EpochRange{{First: 1, Last: s.Visible()}}
	}
	return nil
}

// forget forgets what keeps the past of before the last repair of the log, or of before the restore to which the store owes its state. The
// record that a hold has ended, or that the floor has risen, may be among the commits that are gone, and the tree may be older than that
// record: merges have dropped versions since then which the hold and the floor seem to keep. advanceTimeline removes the records. While
// it cannot, each start forgets them again.
func (t *timeline) forget(visible keys.Epoch) {
	first := keys.Epoch(0)
	for i, r := range t.removed {
		several := i == 0 && len(t.removed) == removedMax  // that have become one, see removedRanges; each may be what a crash has lost
		if r.Last-r.First >= wal.EpochWindow && !several { // more than a crash has lost
			first = max(first, r.First)
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, h := range t.holds {
		if h.Epoch < first {
			h.forget(visible)
		}
	}
	if keys.Epoch(t.floor.Load()) < first {
		t.floor.Store(uint64(visible))
		t.unread = t.recorded // until its record has ended: a later start may read that, and not know of the repair
	}
}

// changedRanges makes the records of some ranges what they should be: the first epoch by the last one, and zero for a record that
// should not exist. It is empty if no record has to be added, and few should not exist.
func changedRanges(known map[keys.Epoch]keys.Epoch, wanted []keys.EpochRange) map[keys.Epoch]keys.Epoch {
	changes, added := map[keys.Epoch]keys.Epoch{}, false
	for last := range known {
		changes[last] = 0
	}
	for _, r := range wanted {
		if known[r.Last] == r.First {
			delete(changes, r.Last)
		} else {
			changes[r.Last], added = r.First, true
		}
	}
	if !added && len(changes) < removedMany {
		return nil
	}
	return changes
}

// recordRemoved writes the records that openRemoved has found necessary, unless that is done.
func (s *Store) recordRemoved(ctx context.Context, x *Session) error {
	t := &s.timeline
	if len(t.unrecorded) == 0 || s.FeatureLevel() < keys.FeatureLevelHistory {
		return nil
	}
	w := &Write{Durability: DurabilitySync, Origin: batch.OriginCleanup}
	w.SetOwn()
	for last, first := range t.unrecorded {
		if first == 0 {
			w.Batch.DeleteRecord(keys.SpaceSystem, keys.RemovedKey(last))
		} else {
			key, value := keys.RemovedRecord(keys.EpochRange{First: first, Last: last})
			w.Batch.SetRecord(keys.SpaceSystem, key, value)
		}
	}
	if _, err := x.commitDurably(ctx, w); err != nil {
		return err
	}
	t.unrecorded = nil
	return nil
}

// removedRanges are those of the records and of recovery, ascending, within the bound. What a crash has lost matters as long as older
// epochs can be read: no watch is after a commit that was not durable.
func removedRanges(known map[keys.Epoch]keys.Epoch, found []keys.EpochRange, retained keys.Epoch) []keys.EpochRange {
	all := slices.Clone(found)
	for last, first := range known {
		if !slices.ContainsFunc(all, func(r keys.EpochRange) bool { return r.Last == last }) {
			all = append(all, keys.EpochRange{First: first, Last: last})
		}
	}
	all = slices.DeleteFunc(all, func(r keys.EpochRange) bool { return r.Last-r.First < wal.EpochWindow && r.Last <= retained })
	slices.SortFunc(all, func(a, b keys.EpochRange) int { return cmp.Compare(a.Last, b.Last) })
	if n := len(all) - removedMax; n > 0 {
		all[n].First = all[0].First
		all = all[n:]
	}
	return all
}

// refuseRemoved refuses an epoch whose state may have had commits that do not exist any more.
func (s *Store) refuseRemoved(e keys.Epoch) error {
	missing, removed := s.Removed(e, 0)
	if !removed {
		return nil
	}
	gone := s.snapshotGone(e)
	gone.Missing = missing
	return gone
}

// Removed reports whether the state after an epoch, and so many operations of the next commit, has commits that do not exist any
// more, and the epochs that are missing.
func (s *Store) Removed(e keys.Epoch, operations uint32) (keys.EpochRange, bool) {
	for _, r := range s.timeline.removed {
		if (e >= r.First || e == r.First-1 && operations > 0) && e < r.Last {
			return r, true
		}
	}
	return keys.EpochRange{}, false
}

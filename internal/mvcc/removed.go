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

// openRemoved reads the records of the epochs that clients may have seen and that do not exist any more, because a repair of the log
// removed them or a crash lost them, and adds those that recovery has met: their skip records are in the log for a while only. Without
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
	s.timeline.removed = removedRanges(known, s.recovery.Skipped, s.timeline.retained())
	w := &Write{Durability: DurabilitySync, Origin: batch.OriginCleanup}
	w.SetOwn()
	changed := false
	for _, r := range s.timeline.removed {
		if first, ok := known[r.Last]; !ok || first != r.First {
			w.Batch.SetRecord(keys.SpaceSystem, removedKey(r.Last), binary.LittleEndian.AppendUint64(nil, uint64(r.First)))
			changed = true
		}
		delete(known, r.Last)
	}
	for last := range known {
		w.Batch.DeleteRecord(keys.SpaceSystem, removedKey(last))
	}
	if changed && s.FeatureLevel() >= keys.FeatureLevelHistory {
		_, _ = s.probe.commitDurably(ctx, w) // without room for it, the skip record does it until the log is truncated
	}
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

func removedKey(last keys.Epoch) []byte {
	return binary.BigEndian.AppendUint64([]byte{keys.SystemRemoved}, uint64(last))
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

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
)

// removedMax bounds the records of repairs. With more, the oldest become one, which has the commits between them as well: a watch
// that comes back to one of those is refused needlessly.
const removedMax = 1000

// openRemoved reads the records of the epochs that repairs of the log removed, and adds those that the replay of the log has
// met: their skip records are in the log for a while only, and without them the difference since such an epoch would leave out
// what the repair has undone.
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
	s.timeline.removed = removedRanges(known, s.recovery.Removed)
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

// removedRanges are those of the records and of the replay, ascending, within the bound.
func removedRanges(known map[keys.Epoch]keys.Epoch, found []keys.EpochRange) []keys.EpochRange {
	all := slices.Clone(found)
	for last, first := range known {
		if !slices.ContainsFunc(all, func(r keys.EpochRange) bool { return r.Last == last }) {
			all = append(all, keys.EpochRange{First: first, Last: last})
		}
	}
	slices.SortFunc(all, func(a, b keys.EpochRange) int { return cmp.Compare(a.Last, b.Last) })
	if n := len(all) - removedMax; n > 0 {
		all[n].First = all[0].First
		all = all[n:]
	}
	return all
}

func removedKey(last keys.Epoch) []byte {
	return binary.BigEndian.AppendUint64([]byte{keys.SystemRemoved}, uint64(last))
}

// Removed reports whether the state after an epoch, and so many operations of the next commit, has commits that a repair of the
// log removed, and the epochs of that repair.
func (s *Store) Removed(e keys.Epoch, operations uint32) (keys.EpochRange, bool) {
	for _, r := range s.timeline.removed {
		if (e >= r.First || e == r.First-1 && operations > 0) && e < r.Last {
			return r, true
		}
	}
	return keys.EpochRange{}, false
}

package mvcc

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
)

// Probe commits a record of the store's own and returns when it is durable: it takes every step that a client's SYNC write takes. The record
// deletes a system key that never exists. Reads, scans, exports and counts do not see it, a checkpoint drops it, and it is admitted when
// only deletions are. Probe is for one goroutine.
func (s *Store) Probe(ctx context.Context) error {
	w := &Write{Durability: DurabilitySync}
	w.Batch.Delete(keys.SpaceSystem, []byte(keys.SystemProbe))
	epoch, err := s.probe.Commit(ctx, w)
	if err != nil {
		return err
	}
	return s.Wait(ctx, epoch, DurabilitySync)
}

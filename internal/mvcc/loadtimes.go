package mvcc

import (
	"context"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// The log does not have bulk loads, and the superblock has the time of the newest tree alone: after a bulk load its time, until there is
// another bulk load or a checkpoint. So the time is recorded as soon as the bulk load is published.

// loadRecordedWithin bounds the wait for that. Without it the next sample records the time.
const loadRecordedWithin = time.Second

// recordLoads records the times of bulk loads that have no record yet.
func (s *Store) recordLoads(ctx context.Context, x *Session) error {
	t := &s.timeline
	if t.keep == 0 || s.FeatureLevel() < keys.FeatureLevelHistory {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loadRecordedWithin)
	defer cancel()
	if err := t.beginRecording(ctx); err != nil {
		return err
	}
	defer t.endRecording()
	next := t.unrecordedLoads()
	if !t.recorded || len(next.noted) == 0 { // without a record of the floor a restart ends the retention
		return nil
	}
	w := &Write{Durability: DurabilitySync, Origin: batch.OriginCleanup}
	w.SetOwn()
	for _, load := range next.noted {
		w.recordSample(load)
	}
	epoch, err := x.Commit(ctx, w)
	if err != nil {
		return err
	}
	t.apply(timeSample{}, &next)
	if last := next.noted[len(next.noted)-1]; last.epoch+1 == epoch {
		t.settled = epoch
	}
	return s.WaitWritten(ctx, epoch, DurabilitySync) // a checkpoint may have begun before the commit
}

func (t *timeline) unrecordedLoads() (out nextRecords) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.changedLocked(timeSample{}, &out)
	return out
}

func (t *timeline) beginRecording(ctx context.Context) error {
	select {
	case t.records <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (t *timeline) endRecording() { <-t.records }

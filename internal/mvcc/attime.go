package mvcc

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// TimeError means that a time cannot be read at.
type TimeError struct {
	Time   uint64     // microseconds since 1970
	Now    uint64     // by the store's clock
	Oldest keys.Epoch // from here on every epoch is readable

	OldestTime uint64 // the state at this time and later is readable, in microseconds since 1970; zero if it is not known
}

func (e *TimeError) Error() string {
	if e.Future() {
		return fmt.Sprintf("mvcc: %v is not in the past: the store's clock shows %v", microTime(e.Time), microTime(e.Now))
	}
	if e.Oldest == 0 {
		return fmt.Sprintf("mvcc: the state of %v cannot be read; past states can be read from the first commit on that was made with a retention", microTime(e.Time))
	}
	return fmt.Sprintf("mvcc: the state of %v can no longer be read; the oldest readable epoch is %d", microTime(e.Time), e.Oldest)
}

// Future reports whether the time is not in the past.
func (e *TimeError) Future() bool { return e.Time >= e.Now }

func microTime(at uint64) string { return time.UnixMicro(int64(at)).UTC().Format(time.RFC3339Nano) }

// EpochAt is the epoch of the state at a time in the past, in microseconds since 1970: the newest one of which the time, which
// is the latest commit time of all epochs up to it, is not later. If the log does not have the commits around the time any
// more, the state may lack commits of at most one sampling interval, a second for a retention of up to 27 hours.
//
// The answer does not change: commits that are not reserved yet get later times (Engine.Stamp), and EpochAt waits until
// those that are reserved are visible, and a bulk load that is being published.
//
// Errors: *TimeError, *FeatureLevelError, and why the context ended.
func (s *Store) EpochAt(ctx context.Context, at uint64) (keys.Epoch, error) {
	return s.epochAt(ctx, nil, at)
}

// epochAt is EpochAt for a session, or nil.
func (s *Store) epochAt(ctx context.Context, x *Session, at uint64) (keys.Epoch, error) {
	if err := s.RequireFeatureLevel(keys.FeatureLevelHistory, "reads at a time"); err != nil {
		return 0, err
	}
	now := s.clock.Now()
	if at >= now {
		return 0, &TimeError{Time: at, Now: now}
	}
	if err := s.AwaitCommitPause(ctx); err != nil { // a bulk load has its time before it is published
		return 0, err
	}
	reserved := s.engine.Reserved()
	if err := s.watermark.waitAlone(ctx, reserved); err != nil {
		return 0, err
	}
	if newest := s.engine.CommitTime(); newest != 0 && at >= newest && reserved > 0 { // zero: no commit since the upgrade says when it was
		return reserved, nil
	}
	before, after, ok := s.timeline.around(at, reserved)
	epoch := before
	if ok && after > before {
		var err error
		if epoch, err = s.refine(ctx, x, at, before, after); err != nil {
			return 0, err
		}
	}
	if ctx.Err() != nil { // it may not have read all that it needs
		return 0, context.Cause(ctx)
	}
	if oldest := s.registry.LowWatermark(); !ok || epoch == 0 || epoch < oldest {
		return 0, &TimeError{Time: at, Now: now, Oldest: oldest, OldestTime: s.TimeOf(oldest)}
	}
	return epoch, nil
}

// EpochAt is that of the store. What it reads of the log counts as a large value (AdmitLarge) until it returns, and may be refused.
func (x *Session) EpochAt(ctx context.Context, at uint64) (keys.Epoch, error) {
	return x.store.epochAt(ctx, x, at)
}

// around returns the epoch of the newest sample that is not after a time, and one from which on every commit is later than the
// time: that of the third sample after it, or the newest epoch if there is none. The next sample is not enough. Its time is
// rounded up, and taken after its epoch, so that commits after its epoch can be before its time; all that are reserved after
// another sample was taken are later.
func (t *timeline) around(at uint64, newest keys.Epoch) (before, after keys.Epoch, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	i, _ := slices.BinarySearchFunc(t.samples, at+1, func(s timeSample, at uint64) int {
		if s.at < at {
			return -1
		}
		return 1
	})
	if i == 0 {
		return 0, 0, false
	}
	if after = newest; i+2 < len(t.samples) {
		after = t.samples[i+2].epoch
	}
	return t.samples[i-1].epoch, after, true
}

// refine looks in the log for the newest commit between two epochs that is not after a time.
func (s *Store) refine(ctx context.Context, x *Session, at uint64, before, after keys.Epoch) (keys.Epoch, error) {
	if s.engine.WaitDurable(ctx, after) != nil {
		return before, nil //nolint:nilerr // the samples say less, and that is an answer
	}
	marks := &s.timeline.marks
	// No commit before the mark is later than the time.
	before = max(before+1, marks.newest(after, at).Epoch()) - 1
	mark, epoch := marks.newest(before+1, math.MaxUint64), before
	_, complete, refused := s.readCommits(ctx, x, &s.timeline.logReads, before, after, mark, logReadMax, func(e keys.Epoch, _ wal.TailMark, h batch.Header) bool {
		if h.Time > at {
			return false
		}
		epoch = e
		return true
	})
	if !complete {
		return before, refused
	}
	return epoch, nil
}

// TimeOf is a time that no commit up to an epoch is later than, in microseconds since 1970: that of the first sample at the
// epoch or after it. Zero if there is none.
func (s *Store) TimeOf(e keys.Epoch) uint64 {
	t := &s.timeline
	t.mu.Lock()
	defer t.mu.Unlock()
	i, _ := slices.BinarySearchFunc(t.samples, e, func(s timeSample, e keys.Epoch) int {
		if s.epoch < e {
			return -1
		}
		return 1
	})
	if i == len(t.samples) {
		return 0
	}
	return t.samples[i].at
}

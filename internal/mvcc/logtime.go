package mvcc

import (
	"context"
	"math"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/wal"
)

// EpochBefore is an epoch such that every commit that is later than a time of the past, in microseconds since 1970, has a later
// epoch. It is that of the newest commit before the first one that is later than the time, as far as the log goes: bulk loads
// between the two have later epochs, because the log does not know their times. It reports false if the log cannot tell, because
// it begins after the time, or has commits without one.
//
// Errors: *TimeError of a time that is not in the past, *FeatureLevelError, and why the context ended.
func (c *Changes) EpochBefore(ctx context.Context, at uint64) (e keys.Epoch, ok bool, err error) {
	s := c.store
	if err := s.RequireFeatureLevel(keys.FeatureLevelHistory, "watches that begin at a time"); err != nil {
		return 0, false, err
	}
	now := s.clock.Now()
	if at >= now {
		return 0, false, &TimeError{Time: at, Now: now}
	}
	reserved := s.engine.Reserved() // later ones get later times
	if reserved > 0 {
		if err := c.Await(ctx, reserved-1, 0); err != nil {
			return 0, false, err
		}
	}
	if e, ok = s.searchLog(ctx, at, reserved); ctx.Err() != nil {
		return 0, false, context.Cause(ctx)
	}
	if !ok {
		e, _, ok = s.timeline.around(at, reserved)
	}
	return e, ok, nil
}

// searchLog reads the log, from the last mark on, up to the first commit that is later than a time, and adds marks. One goroutine
// at a time does, because it may be the whole log. It reports false if the log cannot tell.
func (s *Store) searchLog(ctx context.Context, at uint64, through keys.Epoch) (e keys.Epoch, ok bool) {
	t, oldest := &s.timeline, s.engine.OldestLogEpoch()
	mark := t.marks.newest(through+1, at)
	if mark.Epoch() < oldest { // the log is not kept there any more
		mark = logMark{}
	}
	after, ok := max(mark.Epoch(), oldest, 1)-1, mark.Epoch() > 0 || oldest <= 1
	e = max(mark.Epoch(), 1) - 1
	latest := mark.at
	_, complete, _ := s.readCommits(ctx, nil, &t.searches, after, through, mark, math.MaxInt64, func(one keys.Epoch, next wal.TailMark, h batch.Header) bool {
		switch {
		case h.Time > at:
			return false
		case h.Time == 0: // before the feature level had times; what is later than them is not known
			ok = ok && e > 0
			return true
		}
		e, ok, latest = one, true, max(latest, h.Time)
		t.marks.add(logMark{TailMark: next, at: latest}, oldest)
		return true
	})
	return e, complete && ok
}

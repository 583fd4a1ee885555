package mvcc

import (
	"context"
	"time"

	"epochkv/internal/storage/keys"
)

// runCollector recomputes min-visible on a timer, never on a writer's path.
func (s *Store) runCollector(ctx context.Context) {
	tick := time.NewTicker(s.gcInterval)
	defer tick.Stop()
	var live []keys.Epoch
	past := newRetained(s.retention, s.gcInterval)
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			live = s.refresh(live, past)
		}
	}
}

// refresh publishes a new frontier and min-visible, and returns the epochs that versions must be kept for.
func (s *Store) refresh(live []keys.Epoch, past *retained) []keys.Epoch {
	now := time.Now()
	return s.registry.Refresh(live, past.oldest(now, s.Visible()), now)
}

// samplesMax bounds the memory of the retention rule; a longer retention is sampled more coarsely.
const samplesMax = 4096

// retained remembers which epoch was visible when, so that retention by time becomes retention by epoch.
type retained struct {
	keep    time.Duration
	every   time.Duration
	samples []sample // oldest first
}

type sample struct {
	at    time.Time
	epoch keys.Epoch
}

func newRetained(keep, interval time.Duration) *retained {
	return &retained{keep: keep, every: max(interval, keep/samplesMax)}
}

// oldest is the newest epoch that was visible at least keep ago: everything from there on stays readable.
func (r *retained) oldest(now time.Time, visible keys.Epoch) keys.Epoch {
	if r.keep == 0 {
		return visible
	}
	if n := len(r.samples); n == 0 || now.Sub(r.samples[n-1].at) >= r.every {
		r.samples = append(r.samples, sample{now, visible})
	}
	drop := 0
	for drop+1 < len(r.samples) && now.Sub(r.samples[drop+1].at) >= r.keep {
		drop++
	}
	r.samples = append(r.samples[:0], r.samples[drop:]...)
	return r.samples[0].epoch
}

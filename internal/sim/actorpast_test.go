package sim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// readPast reads old states: at epochs, at times, and as a history.
func (w *actor) readPast(ctx context.Context) {
	switch w.rng.IntN(3) {
	case 0:
		w.epochAt(ctx)
	case 1:
		w.history(ctx)
	default:
		w.diff(ctx)
	}
}

// epochAt asks for the epoch of a time, of before or of now.
func (w *actor) epochAt(ctx context.Context) {
	if w.s.FeatureLevel() < keys.FeatureLevelHistory {
		return
	}
	at := w.s.Clock().Now() - uint64(w.rng.IntN(1+w.rng.IntN(300_000)))
	w.ledger.mu.Lock()
	for before := range w.ledger.past {
		if at = before; w.rng.IntN(2) == 0 {
			break
		}
	}
	w.ledger.mu.Unlock()
	if w.rng.IntN(2) == 0 {
		at = w.s.Clock().Now() - 1 - uint64(w.rng.IntN(3000))
	}
	e, err := w.s.EpochAt(ctx, at)
	if err != nil {
		if !errors.As(err, new(*mvcc.TimeError)) {
			w.refused("epoch at", err)
		}
		return
	}
	if ctx.Err() != nil {
		return
	}
	w.total.add("epoch at")
	whole := w.s.Changes().OldestInLog() <= e+1
	w.ledger.mu.Lock()
	defer w.ledger.mu.Unlock()
	if first, known := w.ledger.past[at]; known && first.whole && e > first.epoch {
		w.ledger.failures = append(w.ledger.failures, fmt.Errorf("the state at the time %d was %d, and is %d", at, first.epoch, e))
	}
	w.ledger.past[at] = pastState{e, whole}
	if len(w.ledger.past) > 40 {
		for one := range w.ledger.past {
			delete(w.ledger.past, one)
			break
		}
	}
	w.ledger.checks = append(w.ledger.checks, func(s *states) error {
		for _, c := range s.commits {
			if c.epoch <= e && c.before > at {
				return fmt.Errorf("the state at the time %d is %d, which has the commit %d of %d", at, e, c.epoch, c.before)
			}
		}
		return nil
	})
}

func (w *actor) history(ctx context.Context) {
	lower, upper := w.bounds()
	o := mvcc.HistoryOptions{Lower: []byte(lower), Upper: []byte(upper), Values: true, Count: 10000, Bytes: 1 << 30}
	h, err := w.x.History(ctx, &o)
	if err != nil {
		if !errors.As(err, new(*mvcc.SnapshotGoneError)) {
			w.refused("history", err)
		}
		return
	}
	w.total.add("history")
	w.ledger.later(func(s *states) error {
		got := map[string]map[keys.Epoch]mvcc.KeyVersion{}
		for _, v := range h.Versions {
			if got[string(v.Key)] == nil {
				got[string(v.Key)] = map[keys.Epoch]mvcc.KeyVersion{}
			}
			got[string(v.Key)][v.Epoch] = v
		}
		for _, key := range s.within(lower, upper) {
			for _, v := range s.keys[key] {
				g, is := got[key][v.epoch]
				switch {
				case v.epoch > h.To || v.epoch <= h.Oldest && !is:
				case !is:
					return fmt.Errorf("the history of %s from %d to %d lacks %d", key, h.Oldest, h.To, v.epoch)
				case g.Deleted != v.deleted || !v.deleted && string(g.Value) != v.value:
					return fmt.Errorf("the history of %s has %.30q at %d, want %+v", key, g.Value, v.epoch, v)
				}
				if c := s.commits[v.epoch]; is && g.Logged && c != nil && (g.Time < c.before || c.after != 0 && g.Time > c.after) {
					return fmt.Errorf("the history of %s at %d has the time %d, want %d to %d", key, v.epoch, g.Time, c.before, c.after)
				}
				delete(got[key], v.epoch)
			}
			for e := range got[key] {
				return fmt.Errorf("the history of %s has a version at %d, which no client wrote", key, e)
			}
		}
		return nil
	})
}

func (w *actor) diff(ctx context.Context) {
	lower, upper := w.bounds()
	from := max(w.s.LowWatermark(), 1)
	if from > w.s.Visible() {
		return
	}
	o := mvcc.DiffOptions{Lower: []byte(lower), Upper: []byte(upper), From: from, Values: true, Count: 10000, Bytes: 1 << 30, Keys: 100000}
	d, err := w.x.Diff(ctx, &o)
	if err != nil {
		if !errors.As(err, new(*mvcc.SnapshotGoneError)) {
			w.refused("diff", err)
		}
		return
	}
	w.total.add("diff")
	w.ledger.later(func(s *states) error {
		got := map[string]mvcc.KeyChange{}
		for _, c := range d.Changes {
			got[string(c.Key)] = c
		}
		for _, key := range s.within(lower, upper) {
			old, now := s.at(key, from), s.at(key, d.To)
			c, is := got[key]
			differs := old.epoch != now.epoch && !(old.deleted && now.deleted)
			if is != differs || is && (c.New.Deleted != now.deleted || string(c.New.Value) != now.value || c.Old.Deleted != old.deleted || string(c.Old.Value) != old.value) {
				return fmt.Errorf("the difference of %s from %d to %d: %+v, want %+v and %+v", key, from, d.To, c, old, now)
			}
			delete(got, key)
		}
		for key := range got {
			return fmt.Errorf("the difference from %d to %d has %s, which no client wrote", from, d.To, key)
		}
		return nil
	})
}

// hold takes, renews, ends and uses holds.
func (w *actor) hold(ctx context.Context) {
	if w.s.FeatureLevel() < keys.FeatureLevelHistory {
		return
	}
	list := w.s.Holds()
	if len(list) == 0 || w.rng.IntN(3) == 0 {
		_, err := w.x.TakeHold(ctx, "test", 0, time.Second)
		if err != nil {
			w.refused("hold", err)
			return
		}
		w.total.add("hold")
		return
	}
	h := list[w.rng.IntN(len(list))]
	switch w.rng.IntN(4) {
	case 0:
		if _, err := w.x.RenewHold(ctx, h.ID, 2*time.Second); err != nil && !errors.Is(err, mvcc.ErrNoHold) {
			w.refused("renew", err)
		}
	case 1:
		if h.Owner != "test" {
			return
		}
		if _, err := w.x.EndHold(ctx, h.ID); err != nil && !errors.Is(err, mvcc.ErrNoHold) {
			w.refused("end hold", err)
		}
	default:
		x, err := w.s.Session()
		if err != nil || h.Epoch == 0 { // that would be the newest epoch
			return
		}
		defer x.Close()
		at, err := x.OpenSnapshot(h.Epoch)
		if err != nil {
			if still := w.s.Holds(); slicesHas(still, h.ID) {
				w.ledger.fail("epoch %d is held: %v", h.Epoch, err)
			}
			return
		}
		w.scan(ctx, x, at)
	}
}

func slicesHas(list []mvcc.Hold, id uint64) bool {
	for _, h := range list {
		if h.ID == id && h.Deadline != 0 {
			return true
		}
	}
	return false
}

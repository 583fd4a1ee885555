package peers

import (
	"context"
	"errors"
	"fmt"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/bench/harness"
)

const (
	steadyRate = 50_000 // keys that become due in a second
	expiryLag  = "ms from the deadline to the commit, p99"
)

// steadily measures how late keys are deleted that become due one after the other.
func steadily() harness.Scenario {
	s := scenario("ttl-steady", fmt.Sprintf("Keys of which %d become due in a second, until the last of them is deleted, beside %.0f durable puts/s. A watch says when each was deleted.",
		steadyRate, besideRate), "expiries", "", harness.Axis{Name: "servers", Points: []int{1}}, nil, load{})
	s.Size, s.Window, s.Fixed = 5*steadyRate, 0, true
	k := epochKVKind()
	s.Arms = []harness.Arm{{Name: k.name, Run: func(r *harness.Run) error { return onServer(r, k, expireSteadily) }}}
	s.Figures = []harness.Figure{
		{Arm: k.name, Measure: expiryLag, AtMost: 1000, Source: fmt.Sprintf("lag p99 1 s at %d expiries/s", steadyRate)},
		{Arm: k.name, AtLeast: 0.9 * steadyRate, Source: fmt.Sprintf("%d expiries/s, with the last one late by a tenth of the time", steadyRate)},
	}
	return s
}

func expireSteadily(ctx context.Context, r *harness.Run, s *server) (err error) {
	before, err := s.alone(ctx, r)
	if err != nil {
		return err
	}
	begin := time.Now().Add(writeTime(r.Size)).Truncate(time.Millisecond)
	deadlines := make(map[string]time.Time, r.Size)
	err = s.putExpiring(ctx, r.Size, func(i int) time.Time {
		due := begin.Add(time.Duration(i) * time.Second / steadyRate).Truncate(time.Millisecond)
		deadlines[string(expiringKey(i))] = due
		return due
	})
	if err != nil {
		return err
	}
	if late := time.Since(begin); late > 0 {
		return fmt.Errorf("writing %d keys took %v longer than planned", r.Size, late)
	}
	f, err := dialEpochKVFeed(s, 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	watch, err := f.watch(ctx, nil)
	if err != nil {
		return err
	}
	stream := watch.(epochKVChanges)
	if err := sleep(ctx, time.Until(begin)); err != nil {
		return err
	}
	lags, early := harness.NewRecorder(), 0
	err = s.against(ctx, r, before, func() (int, error) {
		for seen := 0; seen < r.Size; {
			n, tooEarly, err := stream.deletions(deadlines, lags)
			if err != nil {
				return seen, err
			}
			seen, early = seen+n, early+tooEarly
		}
		return r.Size, nil
	})
	if err != nil {
		return err
	}
	r.Count(expiryLag, float64(harness.Percentile(99, lags))/1e6)
	if err := r.Prove("keys deleted before their deadlines", float64(early), 0, 0); err != nil {
		return err
	}
	present, err := s.presentExpiring(ctx, r.Size)
	if err != nil {
		return err
	}
	return r.Verified(expiringSamples-present, expiringSamples)
}

// deletions waits for the next message, and records how long after its deadline each key was deleted.
func (c epochKVChanges) deletions(deadlines map[string]time.Time, lags *harness.Recorder) (n, early int, err error) {
	commits, err := c.commits()
	if err != nil {
		return 0, 0, err
	}
	for _, commit := range commits {
		for _, event := range commit.GetEvents() {
			due, ours := deadlines[string(event.GetKey())]
			if !ours || event.GetKind() != pb.EventKind_EVENT_KIND_DELETE {
				continue
			}
			n++
			lag := commit.GetTime().AsTime().Sub(due)
			if lag < 0 {
				early++
			}
			lags.Record(lag)
		}
	}
	return n, early, nil
}

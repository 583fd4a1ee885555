package peers

import (
	"context"
	"fmt"
	"math"

	"github.com/epochkv/epochkv/bench/harness"
)

const (
	overwrites = 1 // point: puts over records at a fixed rate
	newestGets = 2 // point: gets of newest versions, in a closed loop

	overwriteRate  = 10_000.0
	readableEpochs = "epochs that stay readable"
	withHistory    = "retention 1h"
	withoutHistory = "no retention"
)

// history measures what keeping old versions costs.
func history() harness.Scenario {
	axis := harness.Axis{Name: "load", Points: []int{overwrites, newestGets}, Labels: []string{"10,000 overwrites/s", "gets of the newest"}}
	s := scenario("history-retention", "A server that keeps an hour of history, beside one that keeps none: durable overwrites that arrive at a fixed rate, and gets of what they wrote.",
		"operations", "", axis, nil, load{})
	s.Size, s.Large = loaded, harness.Sizes{Size: 1_000_000, Window: 20 * window}
	s.Window = 2 * window
	s.Arms = []harness.Arm{historyArm(withHistory, "1h", true), historyArm(withoutHistory, "0s", false)}
	s.Figures = []harness.Figure{
		{Arm: withHistory, Against: withoutHistory, Points: []int{overwrites}, Measure: harness.MeasureP99, AtMost: 1.3, Source: "put p99 at most 1.3 times without"},
		{Arm: withHistory, Against: withoutHistory, Points: []int{newestGets}, AtLeast: 1 / 1.1, Source: "gets of newest versions at most 1.1 times without"},
	}
	return s
}

func historyArm(name, retention string, kept bool) harness.Arm {
	k := epochKVKind()
	arguments := k.arguments
	k.name = name
	k.arguments = func(at place) []string { return append(arguments(at), "--retention", retention) }
	run := func(ctx context.Context, r *harness.Run, s *server, callers []*caller) error {
		if err := overwriteOrGet(ctx, r, s, callers); err != nil {
			return err
		}
		return proveHistory(ctx, r, s, kept)
	}
	return harness.Arm{Name: name, Run: arm{k, load{callers: always(callersMany), inFlight: always(callersMany), run: run}}.run}
}

func overwriteOrGet(ctx context.Context, r *harness.Run, s *server, callers []*caller) error {
	if r.Point == newestGets {
		err := closed(ctx, callers, getAny, r.Window, byServer(r, s))
		r.Latencies(recorded(callers))
		return err
	}
	return arriving(overwriteRate, putOwn)(ctx, r, s, callers)
}

// proveHistory: the epochs below the newest that a read may name are all of them, or next to none.
func proveHistory(ctx context.Context, r *harness.Run, s *server, kept bool) error {
	got, err := s.counters(ctx, "kvserver_durable_epoch", "kvserver_min_visible_epoch")
	if err != nil {
		return err
	}
	if readable := got[0] - got[1]; kept {
		return r.Prove(readableEpochs, readable, got[0]-1, math.Inf(1))
	} else if readable > got[0]/2 && !r.Smoke {
		return fmt.Errorf("%v of %v epochs stay readable without retention", readable, got[0])
	}
	return nil
}

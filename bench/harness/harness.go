// Package harness runs comparisons that can be trusted and repeated.
//
// A comparison is a Scenario: a small declared value that names what is asked, the arms that answer it, the axis along
// which they are asked (writers, value size, ...), and the figures that were promised. The harness runs it so:
//
//	warm-up      every arm twice at every point, smaller, thrown away; this tells how long a round takes (plan.go)
//	round 1      point 1: arm A, arm B, ...   point 2: arm A, arm B, ...
//	round 2      the same with the order of the arms rotated
//	...          at least RoundsMin rounds, more while the time budget lasts
//
// The arms of a point run one directly after the other, so that other load of the machine affects all of them, and a
// ratio is taken within a round and only then over rounds: its median, with a bootstrap confidence interval.
//
// Each run of an arm gets an empty directory and its own seed (the same for all arms of a round), times one section
// of its work, and must then check its data and prove by counters that it ran the way its name says. A run that fails either
// fails its scenario, and the benchmark in the end: there are no figures for wrong answers. Where the data that is there before is large, runs and
// scenarios share it (Shared): it is made once and is not part of what is timed.
//
// All scenarios together keep a time budget: each has a share by its weight, and is made smaller until its rounds fit.
//
// The package knows nothing of databases. Results are data (result.go); Markdown, HTML and benchstat text are made from them.
package harness

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

const (
	// RoundsMin is the number of rounds below which no figure is judged: a median of fewer says little.
	RoundsMin = 5
	// roundsMax ends a scenario even if there is time left: the interval shrinks with the root of the count.
	roundsMax = 11
)

// Options say how much to run.
type Options struct {
	Scratch string        // directory for the data of runs, on the device to be measured
	Budget  time.Duration // for all scenarios together
	Smoke   bool          // one small round each, nothing judged
	Large   bool          // the sizes that the figures ask for, whatever the budget
	Seed    uint64
	Isolate []string                         // command that calls RunIsolated; nil: isolated arms run in this process
	Log     func(format string, args ...any) // progress, line by line
	Verbose bool                             // a line for every run
}

// Execute runs the scenarios one after the other, each with its share of the time that is left, and returns what they
// measured. A scenario of which an arm fails has no results but the reason; the others are run all the same.
func Execute(ctx context.Context, scenarios []Scenario, o Options) (outcomes []Outcome, err error) {
	x := &execution{Options: o, Context: ctx, began: time.Now()}
	defer func() { err = errors.Join(err, x.shared.close()) }()
	var failures []error
	for i, s := range scenarios {
		if err := errors.Join(ctx.Err(), x.shared.enter(s.Stage)); err != nil {
			return outcomes, errors.Join(append(failures, err)...)
		}
		x.Log("[%d/%d] %s: %s elapsed, %s left", i+1, len(scenarios), s.Name, seconds(time.Since(x.began)), seconds(time.Until(x.end())))
		outcome, err := x.scenario(s, share(scenarios[i:], time.Until(x.end())))
		if err != nil {
			x.Log("        failed: %v", err)
			failures = append(failures, fmt.Errorf("scenario %s: %w", s.Name, err))
			outcome = Outcome{Name: s.Name, About: s.About, Failed: err.Error()}
		}
		outcomes = append(outcomes, outcome)
	}
	return outcomes, errors.Join(failures...)
}

func seconds(d time.Duration) time.Duration { return d.Round(time.Second) }

// share is what the first of the scenarios gets of the time that is left.
func share(scenarios []Scenario, left time.Duration) time.Duration {
	sum := 0.0
	for _, s := range scenarios {
		sum += s.weight()
	}
	return time.Duration(float64(left) * scenarios[0].weight() / sum)
}

// execution is a benchmark under way.
type execution struct {
	Options
	context.Context
	began  time.Time
	shared shared
}

func (x *execution) end() time.Time { return x.began.Add(x.Budget) }

// scenario runs rounds until the share is used up. What is made for several scenarios is paid for by all that are left, and not
// by the share of the first.
func (x *execution) scenario(s Scenario, share time.Duration) (Outcome, error) {
	began := time.Now()
	x.shared.made = 0
	if x.Large {
		s.Axis.Points = slices.Concat(s.Axis.Points, s.Large.Points)
	}
	absent := map[string]string{} // arms that cannot run here, and why
	p, err := x.plan(s, share, absent)
	if err != nil {
		return newOutcome(s, p), fmt.Errorf("warm-up: %w", err)
	}
	outcome := newOutcome(s, p)
	outcome.Absent = absent
	for n := 1; n <= p.rounds; n++ {
		roundBegan := time.Now()
		if err := x.round(s, n, p, &outcome, absent); err != nil {
			return outcome, fmt.Errorf("round %d: %w", n, err)
		}
		// Once there are enough rounds, a round that would end after the share of time is not begun; once much more than the share is used, no round is begun.
		next := time.Since(began) - x.shared.made + time.Since(roundBegan)
		enough := n >= RoundsMin && next > share || next > overrunMax*share || time.Now().After(x.end())
		if enough && !x.Large {
			break
		}
	}
	if err := outcome.conclude(s, p.judged); err != nil {
		return outcome, err
	}
	x.Log("        %d rounds in %s; %s%s", outcome.rounds(), seconds(time.Since(began)), outcome.Extent(), outcome.score())
	return outcome, nil
}

// round runs every arm once at every point. Round 0 is a warm-up, whose samples go nowhere (into is nil).
func (x *execution) round(s Scenario, n int, p plan, into *Outcome, absent map[string]string) error {
	for _, point := range s.Axis.Points {
		for i := range s.Arms {
			arm := s.Arms[(i+n)%len(s.Arms)]
			if !arm.runsAt(point) || absent[arm.Name] != "" {
				continue
			}
			if err := x.Err(); err != nil {
				return err
			}
			r := x.run(arm, n, point, p)
			sample, err := r.execute(s.Name, arm, x.Isolate)
			if errors.Is(err, ErrAbsent) {
				absent[arm.Name] = err.Error()
				continue
			}
			if err != nil {
				return fmt.Errorf("arm %s, %s=%d, seed %d: %w", arm.Name, s.Axis.Name, point, r.Seed, err)
			}
			if x.Verbose {
				x.Log("%-20s %s=%-6d round %-2d %-24s %14.0f %s/s", s.Name, s.Axis.Name, point, n, arm.Name, sample.Rate, s.Unit)
			}
			if into != nil {
				into.add(point, arm.Name, sample)
			}
		}
	}
	return nil
}

// run prepares one run of an arm.
func (x *execution) run(arm Arm, n, point int, p plan) *Run {
	return &Run{
		Context: x.Context, Point: point, Size: max(p.size/max(arm.Part, 1), 1), Load: p.load, Window: p.window, Smoke: x.Smoke,
		Seed: x.Seed + uint64(n)*1_000_003 + uint64(point), LoadSeed: x.Seed, scratch: x.Scratch, shared: &x.shared, log: x.Log,
	}
}

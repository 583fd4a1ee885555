// Package harness runs comparisons that can be trusted and repeated.
//
// A comparison is a Scenario: a small declared value that names what is asked, the arms that answer it, the axis along
// which they are asked (writers, value size, ...), and the figures that somebody promised. The harness runs it so:
//
//	warm-up      every arm once at every point, smaller, thrown away
//	round 1      point 1: arm A, arm B, ...   point 2: arm A, arm B, ...
//	round 2      the same with the order of the arms rotated
//	...          at least RoundsMin rounds, more while the time budget lasts
//
// The arms of a point stand next to each other in time, so that what else the machine does falls on all of them, and a
// ratio is taken within a round and only then over rounds: its median, with a bootstrap confidence interval.
//
// Each run of an arm gets an empty directory and its own seed (the same for all arms of a round), times one section
// of its work, and must then check its data and prove by counters that it ran the way its name says. A run that fails either
// fails the whole benchmark: there are no figures for wrong answers.
//
// The package knows nothing of databases. Results are data (result.go); Markdown, HTML and benchstat text are made from them.
package harness

import (
	"context"
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

// Scenario is one comparison.
type Scenario struct {
	Name    string // short, with dashes; the key in results
	About   string // one sentence: the question
	Unit    string // what an operation is, in the plural: "puts"
	Axis    Axis
	Arms    []Arm
	Figures []Figure
	Size    int // operations of one timed section at full size
}

// Axis is the parameter that a scenario varies.
type Axis struct {
	Name   string // "writers"
	Points []int
	Growth bool // the question is how the cost per operation grows along the axis: a slope is fitted
}

// Arm is one way to do the work.
type Arm struct {
	Name   string
	Points []int // where it runs; nil: at every point
	Run    func(*Run) error
}

func (a Arm) runsAt(point int) bool { return a.Points == nil || slices.Contains(a.Points, point) }

// Figure is a bar that an arm has to reach.
type Figure struct {
	Arm     string
	Against string  // the arm it is compared with; empty: the bar is not a ratio
	Points  []int   // where; nil: at every point where both arms run
	AtLeast float64 // ratio or rate
	Source  string  // who asked, or what the origin reached

	Measure   string  // what it is about: a Measure... or the name of a counter; empty: the rate
	AtMost    float64 // a ceiling, instead of AtLeast
	AgainstAt int     // the point at which Against is taken; zero: the same
}

// Validate finds what would silently never be judged: figures about arms or points that do not exist, and names that are taken.
func Validate(scenarios []Scenario) error {
	taken := map[string]bool{}
	for _, s := range scenarios {
		if taken[s.Name] {
			return fmt.Errorf("two scenarios are called %s", s.Name)
		}
		taken[s.Name] = true
		for _, f := range s.Figures {
			if !s.hasArm(f.Arm) || f.Against != "" && !s.hasArm(f.Against) {
				return fmt.Errorf("%s: a figure names arms %q and %q, which are not both there", s.Name, f.Arm, f.Against)
			}
			for _, point := range append([]int{f.AgainstAt}, f.Points...) {
				if point != 0 && !slices.Contains(s.Axis.Points, point) {
					return fmt.Errorf("%s: a figure names point %d, which is not on the axis", s.Name, point)
				}
			}
		}
	}
	return nil
}

func (s Scenario) hasArm(name string) bool {
	return slices.ContainsFunc(s.Arms, func(a Arm) bool { return a.Name == name })
}

// Options say how much to run.
type Options struct {
	Scratch string        // directory for the data of runs, on the device to be measured
	Budget  time.Duration // for all scenarios together
	Smoke   bool          // one small round each, nothing judged
	Seed    uint64
	Log     func(format string, args ...any)
}

// smokeDivisor shrinks a scenario for a smoke run; warmupDivisor for the warm-up.
const (
	smokeDivisor  = 500
	warmupDivisor = 4
)

// Execute runs the scenarios one after the other, each with an equal share of the time that is left, and returns what they
// measured. It stops at the first arm that fails.
func Execute(ctx context.Context, scenarios []Scenario, o Options) ([]Outcome, error) {
	var outcomes []Outcome
	began := time.Now()
	for i, s := range scenarios {
		share := (o.Budget - time.Since(began)) / time.Duration(len(scenarios)-i)
		outcome, err := s.execute(ctx, o, share, began.Add(o.Budget))
		if err != nil {
			return outcomes, fmt.Errorf("scenario %s: %w", s.Name, err)
		}
		outcomes = append(outcomes, outcome)
	}
	return outcomes, nil
}

// execute runs rounds until the share is used up; below RoundsMin rounds only the end of the whole budget stops it.
func (s Scenario) execute(ctx context.Context, o Options, share time.Duration, end time.Time) (Outcome, error) {
	outcome := newOutcome(s)
	size, rounds := s.Size, roundsMax
	if o.Smoke {
		size, rounds = max(size/smokeDivisor, 64), 1
	} else if err := s.round(ctx, o, 0, max(size/warmupDivisor, 1), nil); err != nil {
		return outcome, fmt.Errorf("warm-up: %w", err)
	}
	for n, began := 1, time.Now(); n <= rounds; n++ {
		if err := s.round(ctx, o, n, size, &outcome); err != nil {
			return outcome, fmt.Errorf("round %d: %w", n, err)
		}
		if n >= RoundsMin && time.Since(began) > share || time.Now().After(end) {
			break
		}
	}
	return outcome, outcome.conclude(s)
}

// round runs every arm once at every point. Round 0 is the warm-up, whose samples go nowhere (into is nil).
func (s Scenario) round(ctx context.Context, o Options, n, size int, into *Outcome) error {
	for _, point := range s.Axis.Points {
		for i := range s.Arms {
			arm := s.Arms[(i+n)%len(s.Arms)]
			if !arm.runsAt(point) {
				continue
			}
			if err := ctx.Err(); err != nil {
				return err
			}
			run := Run{Context: ctx, Point: point, Size: size, Seed: o.Seed + uint64(n)*1_000_003 + uint64(point)}
			sample, err := run.execute(arm, o.Scratch)
			if err != nil {
				return fmt.Errorf("arm %s, %s=%d, seed %d: %w", arm.Name, s.Axis.Name, point, run.Seed, err)
			}
			o.Log("%-20s %s=%-6d round %-2d %-24s %14.0f %s/s", s.Name, s.Axis.Name, point, n, arm.Name, sample.Rate, s.Unit)
			if into != nil {
				into.add(point, arm.Name, sample)
			}
		}
	}
	return nil
}

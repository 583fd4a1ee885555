package harness

import (
	"errors"
	"fmt"
	"slices"
	"time"
)

// Scenario is one comparison.
type Scenario struct {
	Name    string // short, with dashes; the key in results
	About   string // one sentence: the question
	Origin  string // what those measured whose technique it is, printed beside ours
	Unit    string // what an operation is, in the plural: "puts"
	Axis    Axis
	Arms    []Arm
	Figures []Figure
	Show    string // what the chart shows: a Measure... or a counter, where the rate is not the point

	Size   int           // operations of one timed section at full size; with a Window whatever the scenario counts
	Window time.Duration // how long the timed section lasts, where not the number of operations ends it
	Fixed  bool          // the size is a part of the question, and not made smaller to fit: there are fewer rounds instead
	Load   int           // records that are there before (Run.Load); what it counts is the scenario's business
	Weight float64       // its share of the time budget beside the others'; zero means 1
	Stage  string        // neighbours with the same stage use what Shared made together

	// Large are the sizes for Options.Large, where Size and Load are less than the figures ask for.
	Large Sizes
}

// Sizes are the sizes of a scenario. Zero fields stand for those that it has anyway.
type Sizes struct {
	Size, Load int
	Window     time.Duration
	Points     []int // more points of the axis
	Rounds     int   // fewer than RoundsMin, where a run is so long that fewer say enough
}

// Axis is the parameter that a scenario varies.
type Axis struct {
	Name   string // "writers"
	Points []int
	Labels []string // of the points, where a number says little; nil: the numbers
	Growth bool     // the question is how the cost per operation grows along the axis: a slope is fitted
}

// Arm is one way to do the work.
type Arm struct {
	Name     string
	Points   []int // where it runs; nil: at every point
	Part     int   // it does one operation for so many of the scenario's, being so much slower; zero means 1
	Isolated bool  // each run has a process of its own, whose memory is then the arm's alone
	Run      func(*Run) error
}

// ErrAbsent is the error, wrapped with the reason, of an arm that cannot run here at all, as a peer that is not installed: the
// scenario goes on without it.
var ErrAbsent = errors.New("absent")

func (a Arm) runsAt(point int) bool { return a.Points == nil || slices.Contains(a.Points, point) }

// Figure is a bar that an arm has to reach.
type Figure struct {
	Arm     string
	Against string  // the arm it is compared with; empty: the bar is not a ratio
	Points  []int   // where; nil: at every point where both arms run
	AtLeast float64 // ratio or rate
	Source  string  // where the figure was asked for, or what the origin reached

	Measure   string  // what it is about: a Measure... or the name of a counter; empty: the rate
	AtMost    float64 // a ceiling, instead of AtLeast
	AgainstAt int     // the point at which Against is taken; zero: the same
}

// Validate finds what would silently never be judged or never end: figures about arms or points that do not exist, scenarios
// without a size, labels that do not fit, and names that are taken.
func Validate(scenarios []Scenario) error {
	taken := map[string]bool{}
	for _, s := range scenarios {
		if taken[s.Name] {
			return fmt.Errorf("two scenarios are called %s", s.Name)
		}
		taken[s.Name] = true
		if err := s.validate(); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	return nil
}

func (s Scenario) validate() error {
	if s.Size <= 0 || len(s.Axis.Points) == 0 {
		return fmt.Errorf("size %d, %d points", s.Size, len(s.Axis.Points))
	}
	if n := len(s.Axis.Labels); n != 0 && n != len(s.Axis.Points) {
		return fmt.Errorf("%d labels for %d points", n, len(s.Axis.Points))
	}
	for _, f := range s.Figures {
		if !s.hasArm(f.Arm) || f.Against != "" && !s.hasArm(f.Against) {
			return fmt.Errorf("a figure names arms %q and %q, which are not both there", f.Arm, f.Against)
		}
		for _, point := range append([]int{f.AgainstAt}, f.Points...) {
			if point != 0 && !slices.Contains(s.Axis.Points, point) {
				return fmt.Errorf("a figure names point %d, which is not on the axis", point)
			}
		}
	}
	return nil
}

func (s Scenario) hasArm(name string) bool {
	return slices.ContainsFunc(s.Arms, func(a Arm) bool { return a.Name == name })
}

func (s Scenario) weight() float64 {
	if s.Weight == 0 {
		return 1
	}
	return s.Weight
}

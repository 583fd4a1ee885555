package harness

import (
	"math"
	"testing"
	"time"
)

// counted runs one arm that reports what the test wants.
func counted(t *testing.T, o Options, axis Axis, figures []Figure, report func(*Run)) ([]Outcome, error) {
	t.Helper()
	return execute(t, o, Scenario{Name: "counted", Unit: "naps", Axis: axis, Size: 1, Figures: figures, Arms: []Arm{{Name: "arm", Run: func(r *Run) error {
		if err := r.Time(r.Size, func() error { time.Sleep(time.Millisecond); return nil }); err != nil {
			return err
		}
		report(r)
		return r.Verified(1, 1)
	}}}})
}

func TestACeilingOnACounterIsMetFromBelowOnly(t *testing.T) {
	figures := []Figure{{Arm: "arm", Measure: "garbage", AtMost: 2, Source: "met at 1, missed at 3"}}
	outcomes, err := counted(t, Options{Budget: time.Minute}, Axis{Name: "n", Points: []int{1, 3}}, figures, func(r *Run) {
		r.Count("garbage", float64(r.Point))
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range outcomes[0].Figures {
		if !v.Judged || v.Met != (v.At == 1) || v.Reached.Median != float64(v.At) {
			t.Errorf("%+v: the counter is the point, and the ceiling is 2", v)
		}
	}
}

func TestAFigureComparesAcrossPoints(t *testing.T) {
	figures := []Figure{{Arm: "arm", Measure: "work", Against: "arm", AgainstAt: 2, Points: []int{6}, AtLeast: 3}}
	outcomes, err := counted(t, Options{Budget: time.Minute}, Axis{Name: "n", Points: []int{2, 6}}, figures, func(r *Run) {
		r.Count("work", float64(r.Point))
	})
	if err != nil {
		t.Fatal(err)
	}
	if v := outcomes[0].Figures; len(v) != 1 || !v[0].Met || v[0].Reached.Median != 3 {
		t.Errorf("verdicts %+v, want 6 against 2 to be 3", v)
	}
}

func TestAFigureAboutNothingMeasuredFailsEvenASmokeRun(t *testing.T) {
	figures := []Figure{{Arm: "arm", Measure: "misspelt", AtLeast: 1}}
	if _, err := counted(t, Options{Smoke: true}, Axis{Name: "n", Points: []int{1}}, figures, func(*Run) {}); err == nil {
		t.Error("a figure about a counter that does not exist was accepted")
	}
}

func TestFitFindsTheExponentOfTheCost(t *testing.T) {
	at := func(n int, cost float64) Point { return Point{At: n, Rate: Summary{Median: 1 / cost}} }
	square := fit([]Point{at(1, 1), at(10, 100), at(100, 10_000)})
	if square == nil || math.Abs(square.Slope-2) > 1e-9 || math.Abs(square.R2-1) > 1e-9 {
		t.Errorf("square: %+v", square)
	}
	if flat := fit([]Point{at(1, 5), at(10, 5), at(100, 5)}); flat == nil || flat.Slope != 0 {
		t.Errorf("flat: %+v", flat)
	}
	if line := fit([]Point{at(1, 1), at(2, 2)}); line != nil {
		t.Errorf("two points gave %+v", line)
	}
}

func TestValidateRefusesWhatWouldNeverBeJudged(t *testing.T) {
	good := Scenario{Name: "s", Size: 1, Axis: Axis{Name: "n", Points: []int{1, 2}}, Arms: []Arm{{Name: "a"}, {Name: "b"}}}
	with := func(f Figure) []Scenario {
		s := good
		s.Figures = []Figure{f}
		return []Scenario{s}
	}
	if err := Validate(with(Figure{Arm: "a", Against: "b", AgainstAt: 2, Points: []int{1}})); err != nil {
		t.Error(err)
	}
	for name, bad := range map[string][]Scenario{
		"two of a name": {good, good},
		"no size":       {{Name: "s", Axis: good.Axis}},
		"labels":        {{Name: "s", Size: 1, Axis: Axis{Points: []int{1, 2}, Labels: []string{"one"}}}},
		"arm":           with(Figure{Arm: "c"}),
		"against":       with(Figure{Arm: "a", Against: "c"}),
		"point":         with(Figure{Arm: "a", Points: []int{3}}),
		"against at":    with(Figure{Arm: "a", Against: "b", AgainstAt: 3}),
	} {
		if Validate(bad) == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

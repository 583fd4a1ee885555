package harness

import (
	"context"
	"errors"
	"io"
	"math"
	"strings"
	"testing"
	"time"
)

func TestTheFittingSizeFollowsALineThroughTheWarmUps(t *testing.T) {
	cost := func(fixed, full time.Duration, part float64) time.Duration {
		return fixed + time.Duration(float64(full)*part)
	}
	for _, c := range []struct{ fixed, full, round, want float64 }{
		{0, 1000, 2000, 1},                // fits as it is
		{0, 1000, 500, 0.5},               // half the time, half the size
		{100, 1000, 600, 0.5},             // the fixed part does not shrink
		{500, 1000, 400, 1.0 / shrinkMax}, // not even the fixed part fits
	} {
		f, full := time.Duration(c.fixed)*time.Millisecond, time.Duration(c.full)*time.Millisecond
		got := fitting(cost(f, full, 1.0/warmupSmall), cost(f, full, 1.0/warmupLarge), time.Duration(c.round)*time.Millisecond)
		if got < c.want*0.99 || got > c.want*1.01 {
			t.Errorf("fixed %v, full %v, round %v: part %.3f, want %.3f", f, full, c.round, got, c.want)
		}
	}
}

func TestAllScenariosKeepTheBudgetTogether(t *testing.T) {
	slow := func(name string, weight float64) Scenario {
		return Scenario{
			Name: name, Unit: "naps", Axis: Axis{Name: "n", Points: []int{1}}, Size: 2000, Weight: weight,
			Arms: []Arm{{Name: "arm", Run: func(r *Run) error {
				if err := r.Time(r.Size, func() error { time.Sleep(time.Duration(r.Size) * time.Millisecond); return nil }); err != nil {
					return err
				}
				return r.Verified(1, 1)
			}}},
		}
	}
	began := time.Now()
	outcomes, err := execute(t, Options{Budget: 3 * time.Second}, slow("light", 1), slow("heavy", 3))
	if err != nil {
		t.Fatal(err)
	}
	// The warm-ups of both alone take a second; 48 s would be their full size.
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("a budget of 3 s took %v", took)
	}
	light, heavy := outcomes[0], outcomes[1]
	if light.rounds() < RoundsMin || heavy.rounds() < RoundsMin {
		t.Errorf("%d and %d rounds", light.rounds(), heavy.rounds())
	}
	if heavy.Size < light.Size || heavy.Size >= heavy.Full {
		t.Errorf("sizes %d and %d of %d: the heavier may do more, and both less than all", light.Size, heavy.Size, heavy.Full)
	}
}

func TestAnIsolatedRunAnswersWithItsSample(t *testing.T) {
	scenarios := []Scenario{{Name: "s", Axis: Axis{Name: "n", Points: []int{1}}, Size: 1, Arms: []Arm{{Name: "arm", Run: func(r *Run) error {
		r.Count("size", float64(r.Size))
		return errors.Join(r.Time(r.Size, func() error { return nil }), r.Verified(1, 1))
	}}}}}
	var out strings.Builder
	in := strings.NewReader(`{"Scenario":"s","Arm":"arm","Point":1,"Size":7,"Scratch":"` + t.TempDir() + `"}`)
	if err := RunIsolated(context.Background(), scenarios, in, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), `"size":7`) || strings.Contains(out.String(), `"resident_mib":0,`) {
		t.Errorf("answer %s", out.String())
	}
	for _, unknown := range []string{`{"Scenario":"t"}`, `{"Scenario":"s","Arm":"t"}`, `?`} {
		if RunIsolated(context.Background(), scenarios, strings.NewReader(unknown), io.Discard) == nil {
			t.Errorf("%s was run", unknown)
		}
	}
}

func TestWindowsShrinkUntilTheirRoundsFit(t *testing.T) {
	const windows = 12 * time.Second
	for round, want := range map[time.Duration]float64{14 * time.Second: 1, 8 * time.Second: 0.5, time.Second: 1.0 / windowShrinkMax} {
		// Each round takes two seconds on top; the warm-ups are noisy, and the smaller one took longer.
		if got := fittingWindows(windows/warmupSmall+2500*time.Millisecond, windows/warmupLarge+1500*time.Millisecond, round, windows); math.Abs(got-want) > 0.01 {
			t.Errorf("rounds of %v: %.2f of the window, want %.2f", round, got, want)
		}
	}
}

func TestAFixedSizeIsNotReduced(t *testing.T) {
	sizes := map[int]int{}
	s := Scenario{
		Name: "fixed", Unit: "naps", Axis: Axis{Name: "n", Points: []int{1}}, Size: 20, Fixed: true,
		Arms: []Arm{{Name: "arm", Run: func(r *Run) error {
			sizes[r.Size]++
			return errors.Join(r.Time(1, func() error { time.Sleep(time.Duration(r.Size) * time.Millisecond); return nil }), r.Verified(1, 1))
		}}},
	}
	if _, err := execute(t, Options{Budget: 50 * time.Millisecond}, s); err != nil {
		t.Fatal(err)
	}
	if len(sizes) != 1 || sizes[20] < 2 {
		t.Errorf("runs by size %v, want all of them at 20", sizes)
	}
}

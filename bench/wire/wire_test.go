package wire

import (
	"context"
	"flag"
	"slices"
	"testing"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
)

var (
	only   = flag.String("wire.only", "", "run only the scenario of this name, at full size, and print its rates")
	oneArm = flag.String("wire.arm", "", "with -wire.only: run this arm alone, for a profile")
	budget = flag.Duration("wire.budget", 30*time.Second, "time for -wire.only")
)

// TestEveryScenarioRunsAndVerifies judges no speed, unless one scenario is asked for by name.
func TestEveryScenarioRunsAndVerifies(t *testing.T) {
	o := harness.Options{Scratch: t.TempDir(), Smoke: true, Budget: time.Minute, Seed: 1, Log: t.Logf}
	scenarios := Scenarios()
	if *only != "" {
		o.Smoke, o.Budget = false, *budget
		scenarios = nil
		for _, s := range Scenarios() {
			if s.Name == *only {
				s.Arms = slices.DeleteFunc(s.Arms, func(a harness.Arm) bool { return *oneArm != "" && a.Name != *oneArm })
				scenarios = append(scenarios, s)
			}
		}
	}
	outcomes, err := harness.Execute(context.Background(), scenarios, o)
	if err != nil {
		t.Fatal(err)
	}
	if len(outcomes) != len(scenarios) {
		t.Fatalf("%d of %d scenarios ran", len(outcomes), len(scenarios))
	}
	for _, o := range outcomes {
		for _, series := range o.Series {
			for _, p := range series.Points {
				last := p.Samples[len(p.Samples)-1]
				t.Logf("%-20s %s=%-3d %-8s median %9.0f %s/s, last round %6.0f ns of CPU and %5.1f allocations each",
					o.Name, o.Axis, p.At, series.Arm, p.Rate.Median, o.Unit, last.CPUPerOp, last.AllocsPerOp)
			}
		}
	}
}

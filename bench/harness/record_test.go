package harness

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// measured is a run of some scenarios, whose rate tells it from others.
func measured(began time.Time, rate float64, names ...string) *Report {
	r := &Report{Began: began, Machine: Machine{CPU: "a processor", Commit: "cafe"}, Command: "epochbench -run ^(a|b)$"}
	for _, name := range names {
		r.Outcomes = append(r.Outcomes, Outcome{
			Name: name, Axis: "n", Series: []Series{{Arm: "x", Points: []Point{{At: 1, Samples: []Sample{{Rate: rate}}}}}},
			Figures: []Verdict{{Arm: "x", At: 1, AtLeast: 1, Reached: Ratio{Median: rate, Low: rate, High: rate}, Judged: true, Met: true}},
		})
	}
	return r
}

func TestRecordKeepsEachScenarioOfItsNewestRun(t *testing.T) {
	day := time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC)
	failed := measured(day.Add(2*time.Hour), 30, "a")
	failed.Outcomes[0].Failed = "no disk"
	smoke := measured(day.Add(3*time.Hour), 40, "b")
	smoke.Smoke = true
	r, err := NewRecord(measured(day, 10, "a", "b"), failed, measured(day.Add(time.Hour), 20, "b"), smoke)
	if err != nil {
		t.Fatal(err)
	}
	newest := &r.runs[0].Outcomes[0].Series[0]
	newest.Growth, newest.Points[0].Rate.Median = &Fit{Slope: 0.25, R2: 0.9}, 20
	var table, lines strings.Builder
	if err := errors.Join(r.WriteMarkdown(&table), r.WriteBenchstat(&lines)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"| 1 | b |", "20/s [20/s, 20/s]", "| 2 | a |", "10/s [10/s, 10/s]", "| 1 | b | x | n | 1: 5e+07 | 0.25 (0.90) |", "Figures: 2 met.", "a processor", "cafe", `epochbench -run ^(a\|b)$`} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("no %q in\n%s", want, &table)
		}
	}
	if n := strings.Count(lines.String(), "\nBenchmark"); n != 2 {
		t.Errorf("%d samples, want one of each scenario:\n%s", n, &lines)
	}
	if _, err := NewRecord(smoke); !errors.Is(err, errNoRun) {
		t.Errorf("record of a smoke run: %v", err)
	}
}

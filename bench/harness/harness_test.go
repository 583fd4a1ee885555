package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// sleepers is a scenario whose slow arm does a tenth of the fast arm's work.
func sleepers(t *testing.T, order *[]string) Scenario {
	t.Helper()
	arm := func(name string, pause time.Duration) Arm {
		return Arm{Name: name, Run: func(r *Run) error {
			if entries, err := os.ReadDir(r.Dir); err != nil || len(entries) != 0 {
				t.Errorf("run directory: %v, %v; want it empty", entries, err)
			}
			*order = append(*order, name)
			if err := r.Time(r.Size, func() error { time.Sleep(pause); return nil }); err != nil {
				return err
			}
			return r.Verified(1, 1)
		}}
	}
	return Scenario{
		Name: "sleep", Unit: "naps", Axis: Axis{Name: "beds", Points: []int{1, 2}}, Size: 10,
		Arms:    []Arm{arm("fast", time.Millisecond), arm("slow", 10*time.Millisecond)},
		Figures: []Figure{{Arm: "fast", Against: "slow", AtLeast: 2}, {Arm: "slow", Against: "fast", AtLeast: 1, Points: []int{2}}},
	}
}

func execute(t *testing.T, o Options, scenarios ...Scenario) ([]Outcome, error) {
	t.Helper()
	o.Scratch, o.Log = t.TempDir(), t.Logf
	return Execute(context.Background(), scenarios, o)
}

func TestArmsAlternateAndFiguresAreJudged(t *testing.T) {
	var order []string
	outcomes, err := execute(t, Options{Budget: time.Minute}, sleepers(t, &order))
	if err != nil {
		t.Fatal(err)
	}
	// After the two warm-ups every second round begins with the other arm, so that neither always comes first.
	if want := []string{"slow", "fast", "slow", "fast", "fast", "slow", "fast", "slow"}; !slices.Equal(order[8:16], want) {
		t.Errorf("order %v, want %v", order[8:16], want)
	}
	o := outcomes[0]
	if len(o.Figures) != 3 {
		t.Fatalf("%d verdicts, want two points of the first figure and one of the second", len(o.Figures))
	}
	for _, v := range o.Figures {
		if !v.Judged || v.Met != (v.Arm == "fast") {
			t.Errorf("%+v: fast must meet its bar and slow must miss it", v)
		}
	}
}

func TestTooFewRoundsAreNotJudged(t *testing.T) {
	var order []string
	outcomes, err := execute(t, Options{Budget: time.Nanosecond}, sleepers(t, &order))
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range outcomes[0].Figures {
		if v.Judged || v.Met {
			t.Errorf("%+v is judged after one round", v)
		}
	}
}

func TestUnverifiedAndUnprovenArmsFailTheBenchmark(t *testing.T) {
	for name, run := range map[string]func(*Run) error{
		"no check":  func(r *Run) error { return r.Time(1, func() error { return nil }) },
		"no timing": func(r *Run) error { return r.Verified(1, 1) },
		"bad data": func(r *Run) error {
			return errors.Join(r.Time(1, func() error { return nil }), r.Verified(1, 2))
		},
		"off": func(r *Run) error {
			return errors.Join(r.Time(1, func() error { return nil }), r.Verified(1, 1), r.Prove("ring reads", 0, 1, math.Inf(1)))
		},
	} {
		s := Scenario{Name: name, Axis: Axis{Name: "n", Points: []int{1}}, Size: 1, Arms: []Arm{{Name: "arm", Run: run}}}
		if _, err := execute(t, Options{Smoke: true}, s); err == nil {
			t.Errorf("%s: the benchmark went on", name)
		}
	}
}

func TestAFailedScenarioLeavesTheOthersTheirResults(t *testing.T) {
	var order []string
	bad := sleepers(t, &order)
	bad.Name, bad.Arms[1].Run = "bad", func(*Run) error { return errors.New("lost a key") }
	outcomes, err := execute(t, Options{Smoke: true}, bad, sleepers(t, &order))
	if err == nil || len(outcomes) != 2 || !strings.Contains(outcomes[0].Failed, "lost a key") || len(outcomes[1].Series) != 2 {
		t.Fatalf("error %v, outcomes %+v", err, outcomes)
	}
	if outcomes[0].Series != nil || outcomes[0].Figures != nil {
		t.Error("there are figures for a wrong answer")
	}
	for kind, write := range map[string]func(io.Writer) error{
		"markdown": (&Report{Outcomes: outcomes}).WriteMarkdown, "html": (&Report{Outcomes: outcomes}).WriteHTML,
	} {
		var b bytes.Buffer
		if err := write(&b); err != nil || !strings.Contains(b.String(), "lost a key") {
			t.Errorf("%s does not say why: %v", kind, err)
		}
	}
}

func TestRatiosOfNothingCanBeSaved(t *testing.T) {
	r := compare([]float64{0, 1}, []float64{0, 0}).finite()
	if _, err := json.Marshal(r); err != nil {
		t.Errorf("%+v: %v", r, err)
	}
}

func TestRatiosAreTakenWithinRounds(t *testing.T) {
	// Both arms slow down together from round to round; the ratio stays 2 and its interval is a point.
	r := compare([]float64{200, 100, 50, 20, 10}, []float64{100, 50, 25, 10, 5})
	if r != (Ratio{2, 2, 2}) {
		t.Errorf("ratio %+v, want 2 [2, 2]", r)
	}
	if r := compare(nil, []float64{1}); r != (Ratio{}) {
		t.Errorf("ratio of nothing: %+v", r)
	}
}

func TestSummaryOfKnownSamples(t *testing.T) {
	s := summarize([]float64{1, 2, 3, 4, 100})
	if s.Median != 3 || s.Min != 1 || s.Max != 100 || s.Count != 5 || math.Abs(s.CV-1.98) > 0.01 {
		t.Errorf("summary %+v", s)
	}
	if median([]float64{1, 2}) != 1.5 {
		t.Error("the median of an even count is the mean of the middle two")
	}
}

func TestReportSurvivesItsFileAndRenders(t *testing.T) {
	var order []string
	outcomes, err := execute(t, Options{Smoke: true}, sleepers(t, &order))
	if err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(t.TempDir(), "report.json")
	saved := &Report{Machine: Describe(), Outcomes: outcomes, Smoke: true}
	if err := saved.Save(name); err != nil {
		t.Fatal(err)
	}
	loaded, err := Load(name)
	if err != nil {
		t.Fatal(err)
	}
	for kind, write := range map[string]func(*bytes.Buffer) error{
		"markdown":  func(b *bytes.Buffer) error { return loaded.WriteMarkdown(b) },
		"html":      func(b *bytes.Buffer) error { return loaded.WriteHTML(b) },
		"benchstat": func(b *bytes.Buffer) error { return loaded.WriteBenchstat(b) },
	} {
		var b bytes.Buffer
		if err := write(&b); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		if !strings.Contains(b.String(), "fast") || !strings.Contains(b.String(), "slow") {
			t.Errorf("%s does not show both arms", kind)
		}
		if strings.Contains(b.String(), "ZgotmplZ") {
			t.Errorf("%s holds what the template engine refused", kind)
		}
		if kind == "html" && (strings.Contains(b.String(), "src=") || strings.Contains(b.String(), "<link")) {
			t.Error("the page needs other files")
		}
	}
}

func TestEverySampleIsOneLineThatBenchstatReads(t *testing.T) {
	o := Outcome{Name: "w1-three-ways", Axis: "entry bytes", Labels: map[int]string{1: "44-104 B"}, Size: 7, Show: "row fill"}
	o.Series = []Series{{Arm: "sort, then put"}}
	o.add(1, "sort, then put", Sample{Rate: 100, Counters: map[string]float64{"row fill": 0.5}})
	var b strings.Builder
	if err := (&Report{Outcomes: []Outcome{o}}).WriteBenchstat(&b); err != nil {
		t.Fatal(err)
	}
	const want = "BenchmarkW1ThreeWays/EntryBytes=44-104-B/arm=sort--then-put\t7\t10000000.00 ns/op\t100 ops/s\t0.000 allocs/op\t0.0 B/op\t0.5 row-fill\n"
	if !strings.HasSuffix(b.String(), want) {
		t.Errorf("got %q", b.String())
	}
}

func TestQuietWaitsForTheBackground(t *testing.T) {
	for range 10 { // on a busy machine the loop may not run at all for two windows
		busy := make(chan time.Time, 1)
		go func() {
			for began := time.Now(); time.Since(began) < 150*time.Millisecond; {
			}
			busy <- time.Now()
		}()
		(&Run{}).Quiet()
		select {
		case <-busy:
			return
		default:
			<-busy
		}
	}
	t.Error("it did not wait for a loop that burns a processor")
}

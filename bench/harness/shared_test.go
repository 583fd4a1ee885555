package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

// windowed is a scenario of one arm whose runs end after a time and share what Begin sets up.
func windowed(begin func(*Run) (func() error, error), run func(*Run) error) Scenario {
	return Scenario{
		Name: "windowed", Unit: "naps", Axis: Axis{Name: "n", Points: []int{1}}, Size: 1000, Window: time.Second, Begin: begin,
		Arms: []Arm{{Name: "arm", Run: run}},
	}
}

func nap(r *Run) error {
	own := Server{PID: os.Getpid(), Dir: r.Dir}
	err := r.TimeServer(own, func() (int, error) { time.Sleep(r.Window); return 10, nil })
	return errors.Join(err, r.Verified(1, 1))
}

func TestWhatRunsShareIsTakenDownHoweverTheyEnd(t *testing.T) {
	for name, run := range map[string]func(*Run) error{"well": nap, "badly": func(*Run) error { return errors.New("bad") }} {
		var dir string
		ended := 0
		_, err := execute(t, Options{Smoke: true}, windowed(func(r *Run) (func() error, error) {
			dir = r.Dir
			return func() error { ended++; return os.WriteFile(dir+"/last", nil, 0o600) }, nil
		}, run))
		if (err != nil) != (name == "badly") {
			t.Errorf("%s: error %v", name, err)
		}
		if _, err := os.Stat(dir); ended != 1 || !os.IsNotExist(err) {
			t.Errorf("%s: taken down %d times, directory: %v; want it once and the directory gone", name, ended, err)
		}
	}
}

func TestAnAbsentArmIsLeftOutAndNamed(t *testing.T) {
	tries := 0
	outcomes, err := execute(t, Options{Budget: time.Minute}, Scenario{
		Name: "s", Unit: "naps", Axis: Axis{Name: "n", Points: []int{1, 2}}, Size: 1,
		Arms:    []Arm{{Name: "gone", Run: func(*Run) error { tries++; return fmt.Errorf("%w: not in PATH", ErrAbsent) }}, {Name: "here", Run: nap}},
		Figures: []Figure{{Arm: "here", Against: "gone", AtLeast: 1}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if tries != 1 || len(outcomes[0].Figures) != 0 {
		t.Errorf("%d tries, verdicts %+v; want one and none", tries, outcomes[0].Figures)
	}
	var text bytes.Buffer
	if err := (&Report{Outcomes: outcomes}).WriteMarkdown(&text); err != nil || !strings.Contains(text.String(), "gone did not run: absent: not in PATH") {
		t.Errorf("the tables do not say why an arm is missing: %v\n%s", err, text.String())
	}
}

func TestAServersOwnCostsAreReported(t *testing.T) {
	var sample Sample
	_, err := execute(t, Options{Smoke: true}, windowed(nil, func(r *Run) error {
		if r.Window != smokeWindow || !r.Smoke {
			t.Errorf("window %v, smoke %v", r.Window, r.Smoke)
		}
		burn := func() (int, error) {
			for began := time.Now(); time.Since(began) < 60*time.Millisecond; {
			}
			return 6, nil
		}
		err := r.TimeServer(Server{PID: os.Getpid(), Dir: r.Dir}, burn)
		sample = r.sample
		return errors.Join(err, r.Verified(1, 1))
	}))
	if err != nil {
		t.Fatal(err)
	}
	// The clock ticks a hundred times a second: 60 ms are 5 to 7 ticks, less where others want the processor too.
	if sample.CPUPerOp < 1e6 || sample.ResidentMiB <= 0 || sample.Rate <= 0 || !sample.Apart {
		t.Errorf("sample %+v: six operations of 10 ms", sample)
	}
}

package harness

import (
	"errors"
	"os"
	"testing"
	"time"
)

func TestAServersOwnCostsAreReported(t *testing.T) {
	var sample Sample
	burn := func() (int, error) {
		for began := ProcessCPU(); ProcessCPU()-began < 60*time.Millisecond; { // however busy the machine is
		}
		return 6, nil
	}
	_, err := execute(t, Options{Smoke: true}, Scenario{
		Name: "apart", Unit: "burns", Axis: Axis{Name: "n", Points: []int{1}}, Size: 1, Window: time.Second,
		Arms: []Arm{{Name: "arm", Run: func(r *Run) error {
			err := r.TimeServer(os.Getpid(), burn)
			sample = r.sample
			return errors.Join(err, r.Verified(1, 1))
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	// The clock ticks a hundred times a second: 60 ms are about 6 ticks.
	if sample.CPUPerOp < 1e6 || sample.ResidentMiB <= 0 || sample.Rate <= 0 || !sample.Apart {
		t.Errorf("sample %+v: six operations of 10 ms", sample)
	}
}

func TestAServerThatEndsNothingHasARate(t *testing.T) {
	r := Run{Context: t.Context()}
	if err := r.TimeServer(os.Getpid(), func() (int, error) { time.Sleep(time.Millisecond); return 0, nil }); err != nil {
		t.Fatal(err)
	}
	if rate := r.sample.Rate; rate <= 0 || rate > 1000 {
		t.Errorf("rate %v: nothing ended within a millisecond", rate)
	}
}

package scenarios

import (
	"errors"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
	"github.com/epochkv/epochkv/internal/config"
)

// A server that gets no requests.
const (
	idleShare = "percent of a core"
	startTime = "ms to start"
)

// startServer runs a whole kvserver on an empty directory until the returned function is called.
func startServer(dir string) (stop func() error, err error) {
	c := config.Default()
	c.DataDir, c.Listen, c.HTTP = dir, "127.0.0.1:0", "127.0.0.1:0"
	_, stop, err = workload.StartServer(c)
	return stop, err
}

func idle() harness.Scenario {
	return harness.Scenario{
		Name: "idle", About: "A server that gets no requests: what its background work takes of the processor.",
		Unit: "seconds", Axis: harness.Axis{Name: "servers", Points: []int{1}}, Size: 1, Window: 2 * time.Second, Show: idleShare,
		Arms:    []harness.Arm{{Name: ours.name, Isolated: true, Run: runIdle}},
		Figures: []harness.Figure{{Arm: ours.name, Measure: idleShare, AtMost: 1, Source: "idle server under 1 % of a core"}},
	}
}

func runIdle(r *harness.Run) error {
	stop, err := startServer(r.Dir)
	if err != nil {
		return err
	}
	time.Sleep(r.Window / 4) // work that the start has left is not idleness
	err = r.Time(1, func() error { time.Sleep(r.Window); return nil })
	if err := errors.Join(err, stop()); err != nil {
		return err
	}
	r.Count(idleShare, 100*r.CPUSeconds()/r.Seconds())
	return r.Verified(1, 1)
}

func startEmpty() harness.Scenario {
	return harness.Scenario{
		Name: "start-empty", About: "Starting a server on an empty directory, until it accepts requests.",
		Unit: "starts", Axis: harness.Axis{Name: "servers", Points: []int{1}}, Size: 1, Fixed: true, Weight: 0.2, Show: startTime,
		Arms:    []harness.Arm{{Name: ours.name, Isolated: true, Run: runStartEmpty}},
		Figures: []harness.Figure{{Arm: ours.name, Measure: startTime, AtMost: 100, Source: "start-up with an empty directory under 100 ms"}},
	}
}

func runStartEmpty(r *harness.Run) error {
	var stop func() error
	if err := r.Time(1, func() (err error) { stop, err = startServer(r.Dir); return err }); err != nil {
		return err
	}
	r.Count(startTime, 1000*r.Seconds())
	return errors.Join(stop(), r.Verified(1, 1))
}

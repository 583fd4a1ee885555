package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"
)

// isolatedRun is what a process is told that runs one arm once; it answers with a Sample. Both are JSON.
type isolatedRun struct {
	Scenario, Arm     string
	Point, Size, Load int
	Window            time.Duration
	Smoke             bool
	Seed, LoadSeed    uint64
	Scratch           string
}

// isolate runs the arm in a process of its own.
func (r *Run) isolate(scenario string, arm Arm, command []string) (sample Sample, err error) {
	request, err := json.Marshal(isolatedRun{
		Scenario: scenario, Arm: arm.Name, Point: r.Point, Size: r.Size, Load: r.Load, Window: r.Window, Smoke: r.Smoke,
		Seed: r.Seed, LoadSeed: r.LoadSeed, Scratch: r.scratch,
	})
	if err != nil {
		return sample, err
	}
	var out bytes.Buffer
	process := exec.CommandContext(r, command[0], command[1:]...)
	process.Stdin, process.Stdout, process.Stderr = bytes.NewReader(request), &out, os.Stderr
	if err := process.Run(); err != nil {
		return sample, fmt.Errorf("its own process: %w", err)
	}
	return sample, json.Unmarshal(out.Bytes(), &sample)
}

// residentFile is how much of files this process has mapped and in memory: at first that is its program.
func residentFile() int64 {
	kb, err := strconv.ParseInt(strings.TrimSuffix(field("/proc/self/status", "RssFile"), " kB"), 10, 64)
	if err != nil {
		return 0
	}
	return kb << 10
}

// RunIsolated does in a process of its own what Execute asks of it: it reads which arm to run, and writes the sample. The
// process must know the same scenarios.
func RunIsolated(ctx context.Context, scenarios []Scenario, in io.Reader, out io.Writer) (err error) {
	var q isolatedRun
	if err := json.NewDecoder(in).Decode(&q); err != nil {
		return err
	}
	i := slices.IndexFunc(scenarios, func(s Scenario) bool { return s.Name == q.Scenario })
	if i < 0 {
		return fmt.Errorf("no scenario is called %q", q.Scenario)
	}
	arms := scenarios[i].Arms
	j := slices.IndexFunc(arms, func(a Arm) bool { return a.Name == q.Arm })
	if j < 0 {
		return fmt.Errorf("%s has no arm %q", q.Scenario, q.Arm)
	}
	var own shared
	defer func() { err = errors.Join(err, own.close()) }()
	r := &Run{
		Context: ctx, Point: q.Point, Size: q.Size, Load: q.Load, Window: q.Window, Smoke: q.Smoke,
		Seed: q.Seed, LoadSeed: q.LoadSeed, scratch: q.Scratch, shared: &own, log: func(string, ...any) {},
	}
	// The program holds every peer there is, which is no arm's memory: a server's is a third of it.
	program := residentFile()
	sample, err := r.execute(q.Scenario, arms[j], nil)
	if err != nil {
		return err
	}
	sample.ResidentMiB = mib(peakResident("self") - program)
	return json.NewEncoder(out).Encode(sample)
}

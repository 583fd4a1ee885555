package harness

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Run is one run of one arm: what it is asked, and where it reports.
type Run struct {
	context.Context
	Point    int    // on the scenario's axis
	Size     int    // operations of the timed section, or whatever the scenario's Size is
	Load     int    // records that are there before
	Seed     uint64 // the same for every arm of the round
	LoadSeed uint64 // the same in all rounds, for what they share
	Dir      string // empty, the run's own

	Window time.Duration // how long the timed section lasts, if the scenario has a window
	Smoke  bool          // only whether it works is asked

	scratch   string
	shared    *shared
	log       func(format string, args ...any)
	sharedDir string // of what was shared with other runs
	sample    Sample
	cpu       time.Duration
	passed    int64 // bytes that the process passed to system calls that write, during the timed section
	timed     bool
	checked   bool
}

// Sample is what one run measured.
type Sample struct {
	Rate        float64            `json:"rate"` // operations per second
	Seconds     float64            `json:"seconds"`
	CPUPerOp    float64            `json:"cpu_ns_per_op"`
	AllocsPerOp float64            `json:"allocs_per_op"`
	BytesPerOp  float64            `json:"alloc_bytes_per_op"`
	ResidentMiB float64            `json:"resident_mib"`           // the most that the process had; of an isolated arm less its program
	WrittenMiB  float64            `json:"written_mib"`            // to the device during the timed section, as the kernel counts: see processIO
	DiskMiB     float64            `json:"disk_mib"`               // of the run's files, and of the shared ones that it used, when it ended
	Apart       bool               `json:"server_apart,omitempty"` // CPU, memory and bytes are a server's; allocations are not counted
	Counters    map[string]float64 `json:"counters,omitempty"`
	Latency     *Latency           `json:"latency,omitempty"`
}

// errUnverified fails an arm that forgot a part of its duty.
var errUnverified = errors.New("the arm timed nothing or did not check its data")

func (r *Run) execute(scenario string, arm Arm, isolate []string) (Sample, error) {
	if arm.Isolated && isolate != nil {
		return r.isolate(scenario, arm, isolate)
	}
	dir, err := os.MkdirTemp(r.scratch, "run-")
	if err != nil {
		return Sample{}, err
	}
	r.Dir = dir
	defer func() { _ = os.RemoveAll(dir) }() // scratch: the next `make clean` removes what remains
	runtime.GC()
	if err := arm.Run(r); err != nil {
		return Sample{}, err
	}
	if !r.timed || !r.checked {
		return Sample{}, errUnverified
	}
	if !r.sample.Apart {
		r.sample.DiskMiB = mib(treeBytes(dir))
	}
	if r.sharedDir != "" {
		r.sample.DiskMiB += mib(treeBytes(r.sharedDir))
	}
	return r.sample, nil
}

// Time runs the section that the sample is about; ops is how many operations it does. An arm calls it once.
func (r *Run) Time(ops int, section func() error) error {
	return r.TimeCounted(func() (int, error) { return ops, section() })
}

// TimeCounted is Time for a section that learns only meanwhile how many operations it does.
func (r *Run) TimeCounted(section func() (ops int, err error)) error {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, io, began := ProcessCPU(), ioOf("self"), time.Now()
	ops, err := section()
	if err != nil {
		return err
	}
	elapsed := time.Since(began)
	cpu, io = ProcessCPU()-cpu, ioOf("self").since(io)
	runtime.ReadMemStats(&after)
	n := float64(max(ops, 1))
	r.sample.Rate = n / elapsed.Seconds()
	r.sample.Seconds = elapsed.Seconds()
	r.sample.CPUPerOp, r.cpu = float64(cpu.Nanoseconds())/n, cpu
	r.sample.AllocsPerOp = float64(after.Mallocs-before.Mallocs) / n
	r.sample.BytesPerOp = float64(after.TotalAlloc-before.TotalAlloc) / n
	r.sample.WrittenMiB, r.passed = mib(io.written), io.passed
	r.timed = true
	return nil
}

// quietMax bounds Quiet for processes that never rest.
const (
	quietMax   = time.Second
	quietCPU   = time.Millisecond // in a window
	quietEvery = 10 * time.Millisecond
)

// Quiet waits until this process has done next to nothing for two windows: what opening a store leaves to its background, as laying
// out the next segment of a log, is done once in a server's life and not what is asked.
func (r *Run) Quiet() {
	if r.Smoke {
		return
	}
	for began, windows := time.Now(), 0; windows < 2 && time.Since(began) < quietMax; {
		cpu, before := ProcessCPU(), ioOf("self")
		time.Sleep(quietEvery)
		if windows++; ProcessCPU()-cpu > quietCPU || ioOf("self").written != before.written {
			windows = 0
		}
	}
}

// Verified records that the arm's data was checked: got of want items were right.
func (r *Run) Verified(got, want int) error {
	if got != want {
		return fmt.Errorf("data check: %d of %d items are right", got, want)
	}
	r.checked = true
	return nil
}

// Count records a counter that belongs to the sample. What is no number, as a share of nothing, is not recorded.
func (r *Run) Count(name string, value float64) {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return
	}
	if r.sample.Counters == nil {
		r.sample.Counters = map[string]float64{}
	}
	r.sample.Counters[name] = value
}

// Prove records a counter and fails the run unless it lies within [low, high]: the arm did what its name says.
func (r *Run) Prove(name string, value, low, high float64) error {
	r.Count(name, value)
	if value < low || value > high {
		return fmt.Errorf("proof: %s is %g, want it within [%g, %g]", name, value, low, high)
	}
	return nil
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }

// ProcessCPU is the processor time that this process has taken.
func ProcessCPU() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// processIO is what a process has written.
type processIO struct {
	// written is what went to devices. Of buffered writes the kernel counts the memory that became dirty. Where that is kept in large pieces
	// (ext4 since Linux 6.16), random writes of 8 KiB count several times.
	written int64
	passed  int64 // to system calls that write: files, and sockets and pipes as well; not to io_uring
}

func (p processIO) since(before processIO) processIO {
	return processIO{written: p.written - before.written, passed: p.passed - before.passed}
}

// ioOf is what a process has written so far; nothing where the kernel does not count it.
func ioOf(pid string) (p processIO) {
	file := filepath.Join("/proc", pid, "io")
	p.written, _ = strconv.ParseInt(field(file, "write_bytes"), 10, 64)
	p.passed, _ = strconv.ParseInt(field(file, "wchar"), 10, 64)
	return p
}

// treeBytes is the space that the files below dir take on the device, holes and preallocation counted as the device does.
func treeBytes(dir string) (sum int64) {
	_ = filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		var stat unix.Stat_t
		if err == nil && entry.Type().IsRegular() && unix.Lstat(name, &stat) == nil {
			sum += stat.Blocks * 512
		}
		return nil
	})
	return sum
}

// WrittenBytes is what the process passed to system calls that write, during the timed section: for engines, what they wrote to files
// without io_uring.
func (r *Run) WrittenBytes() float64 { return float64(r.passed) }

// Seconds is how long the timed section took.
func (r *Run) Seconds() float64 { return r.sample.Seconds }

// CPUSeconds is the processor time that the process used meanwhile, or the server of TimeServer.
func (r *Run) CPUSeconds() float64 { return r.cpu.Seconds() }

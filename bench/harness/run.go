package harness

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Run is one run of one arm: what it is asked, and where it reports.
type Run struct {
	context.Context
	Point int    // on the scenario's axis
	Size  int    // operations of the timed section
	Seed  uint64 // the same for every arm of the round
	Dir   string // empty, the run's own

	sample  Sample
	timed   bool
	checked bool
}

// Sample is what one run measured.
type Sample struct {
	Rate        float64            `json:"rate"` // operations per second
	Seconds     float64            `json:"seconds"`
	CPUPerOp    float64            `json:"cpu_ns_per_op"`
	AllocsPerOp float64            `json:"allocs_per_op"`
	BytesPerOp  float64            `json:"alloc_bytes_per_op"`
	ResidentMiB float64            `json:"resident_mib"` // of the process, at the end of the timed section
	WrittenMiB  float64            `json:"written_mib"`  // to the device during the timed section
	DiskMiB     float64            `json:"disk_mib"`     // in the run's directory, when it ended
	Counters    map[string]float64 `json:"counters,omitempty"`
	Latency     *Latency           `json:"latency,omitempty"`
}

// errUnverified fails an arm that forgot a part of its duty.
var errUnverified = errors.New("the arm timed nothing or did not check its data")

func (r *Run) execute(arm Arm, scratch string) (Sample, error) {
	dir, err := os.MkdirTemp(scratch, "run-")
	if err != nil {
		return Sample{}, err
	}
	r.Dir = dir
	defer func() { _ = os.RemoveAll(dir) }() // scratch: what stays behind is removed by the next `make clean`
	runtime.GC()
	if err := arm.Run(r); err != nil {
		return Sample{}, err
	}
	if !r.timed || !r.checked {
		return Sample{}, errUnverified
	}
	r.sample.DiskMiB = mib(treeBytes(dir))
	return r.sample, nil
}

// Time runs the section that the sample is about; ops is how many operations it does. An arm calls it once.
func (r *Run) Time(ops int, section func() error) error {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	cpu, written, began := processCPU(), processWritten(), time.Now()
	if err := section(); err != nil {
		return err
	}
	elapsed := time.Since(began)
	cpu, written = processCPU()-cpu, processWritten()-written
	runtime.ReadMemStats(&after)
	n := float64(ops)
	r.sample.Rate = n / elapsed.Seconds()
	r.sample.Seconds = elapsed.Seconds()
	r.sample.CPUPerOp = float64(cpu.Nanoseconds()) / n
	r.sample.AllocsPerOp = float64(after.Mallocs-before.Mallocs) / n
	r.sample.BytesPerOp = float64(after.TotalAlloc-before.TotalAlloc) / n
	r.sample.WrittenMiB, r.sample.ResidentMiB = mib(written), mib(processResident())
	r.timed = true
	return nil
}

// Verified records that the arm's data was checked: got of want items were right.
func (r *Run) Verified(got, want int) error {
	if got != want {
		return fmt.Errorf("data check: %d of %d items are right", got, want)
	}
	r.checked = true
	return nil
}

// Count records a counter that belongs to the sample.
func (r *Run) Count(name string, value float64) {
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

func processCPU() time.Duration {
	var usage unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// processWritten is what this process has sent to devices; 0 where the kernel does not count it.
func processWritten() int64 {
	text, err := os.ReadFile("/proc/self/io")
	if err != nil {
		return 0
	}
	_, after, _ := strings.Cut(string(text), "\nwrite_bytes: ")
	number, _, _ := strings.Cut(after, "\n")
	n, _ := strconv.ParseInt(number, 10, 64)
	return n
}

func processResident() int64 {
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(fields[1], 10, 64)
	return pages * int64(os.Getpagesize())
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

// WrittenBytes is what the timed section sent to the device.
func (r *Run) WrittenBytes() float64 { return r.sample.WrittenMiB * (1 << 20) }

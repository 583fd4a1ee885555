package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// TimeServer is Time for work that a server in a process of its own does: processor time, peak memory and bytes written are that
// process's. The section says how many operations it did. What the load generator costs becomes a counter.
func (r *Run) TimeServer(pid int, section func() (ops int, err error)) error {
	process := strconv.Itoa(pid)
	forgetPeak(process)
	cpu, err := serverCPU(process)
	if err != nil {
		return err
	}
	own, io, began := ProcessCPU(), ioOf(process), time.Now()
	ops, err := section()
	if err != nil {
		return err
	}
	// An arm that completed no operation was executing one: ratios are taken of rates, and no rate may be zero.
	elapsed, n := time.Since(began), float64(max(ops, 1))
	after, err := serverCPU(process)
	if err != nil {
		return err
	}
	r.sample.Rate = n / elapsed.Seconds()
	r.sample.Seconds = elapsed.Seconds()
	r.cpu = after - cpu
	r.sample.CPUPerOp = float64(r.cpu.Nanoseconds()) / n
	io = ioOf(process).since(io)
	r.sample.WrittenMiB, r.passed = mib(io.written), io.passed
	r.sample.ResidentMiB = mib(peakResident(process))
	r.sample.Apart = true
	r.Count("client CPU ns/op", float64((ProcessCPU()-own).Nanoseconds())/n)
	r.timed = true
	return nil
}

// tick is the unit of /proc/PID/stat: a hundredth of a second on every Linux that Go runs on.
const tick = time.Second / 100

// serverCPU is the time that all threads of a process, those that have ended too, spent on processors.
func serverCPU(process string) (time.Duration, error) {
	text, err := os.ReadFile(filepath.Join("/proc", process, "stat"))
	if err != nil {
		return 0, err
	}
	// The name is in brackets and may contain any character; the rest begins with field 3, and the times are fields 14 and 15.
	rest := string(text)[strings.LastIndexByte(string(text), ')')+1:]
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%s/stat: %q", process, text)
	}
	user, userErr := strconv.ParseInt(fields[11], 10, 64)
	system, systemErr := strconv.ParseInt(fields[12], 10, 64)
	if userErr != nil || systemErr != nil {
		return 0, fmt.Errorf("/proc/%s/stat: %q", process, text)
	}
	return time.Duration(user+system) * tick, nil
}

// forgetPeak makes the kernel count a process's peak memory from now on. Where it may not, the peak is that since the start.
func forgetPeak(process string) {
	const resetPeak = "5"
	_ = os.WriteFile(filepath.Join("/proc", process, "clear_refs"), []byte(resetPeak), 0)
}

// peakResident is the most memory that a process has had resident; 0 where the kernel does not tell.
func peakResident(process string) int64 {
	kb, err := strconv.ParseInt(strings.TrimSuffix(field(filepath.Join("/proc", process, "status"), "VmHWM"), " kB"), 10, 64)
	if err != nil {
		return 0
	}
	return kb << 10
}

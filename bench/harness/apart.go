package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Server is a process of its own that does the work of a run.
type Server struct {
	PID int
	Dir string // its data
}

// TimeServer is Time for work that a server in another process does: processor time, memory (the peak since the server's start), and
// bytes are the server's. The section says how many operations it did. What the load generator costs becomes a counter.
func (r *Run) TimeServer(s Server, section func() (ops int, err error)) error {
	pid := strconv.Itoa(s.PID)
	cpu, err := serverCPU(pid)
	if err != nil {
		return err
	}
	own, written, began := processCPU(), processWritten(pid), time.Now()
	ops, err := section()
	if err != nil {
		return err
	}
	elapsed, n := time.Since(began), float64(max(ops, 1))
	after, err := serverCPU(pid)
	if err != nil {
		return err
	}
	r.sample.Rate = float64(ops) / elapsed.Seconds()
	r.sample.Seconds = elapsed.Seconds()
	r.sample.CPUPerOp = float64((after - cpu).Nanoseconds()) / n
	r.sample.WrittenMiB = mib(processWritten(pid) - written)
	r.sample.ResidentMiB = mib(peakResident(pid))
	r.sample.DiskMiB = mib(treeBytes(s.Dir))
	r.sample.Apart = true
	r.Count("client CPU ns/op", float64((processCPU()-own).Nanoseconds())/n)
	r.timed = true
	return nil
}

// tick is the unit of /proc/PID/stat: a hundredth of a second on every Linux that Go runs on.
const tick = time.Second / 100

// serverCPU is the time that all threads of a process, those that have ended too, spent on processors.
func serverCPU(pid string) (time.Duration, error) {
	text, err := os.ReadFile(filepath.Join("/proc", pid, "stat"))
	if err != nil {
		return 0, err
	}
	// The name stands in brackets and may hold anything; what follows begins with field 3, and times are 14 and 15.
	_, rest, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(rest)
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%s/stat: %q", pid, text)
	}
	user, userErr := strconv.ParseInt(fields[11], 10, 64)
	system, systemErr := strconv.ParseInt(fields[12], 10, 64)
	if userErr != nil || systemErr != nil {
		return 0, fmt.Errorf("/proc/%s/stat: %q", pid, text)
	}
	return time.Duration(user+system) * tick, nil
}

// peakResident is the most memory that a process has had resident; 0 where the kernel does not tell.
func peakResident(pid string) int64 {
	kb, err := strconv.ParseInt(strings.TrimSuffix(field(filepath.Join("/proc", pid, "status"), "VmHWM"), " kB"), 10, 64)
	if err != nil {
		return 0
	}
	return kb << 10
}

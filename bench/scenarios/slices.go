package scenarios

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/bench/engines"
	"github.com/epochkv/epochkv/bench/harness"
)

// sliced compares two commit paths whose stores are open together, in short slices that alternate: what else happens on the
// machine then meets both, and a slice that it disturbs is dropped.
type sliced struct {
	buffer  int64
	rotates bool // rotations and merges belong to the slices; else a slice with a rotation is dropped
}

const (
	sliceTime = 125 * time.Millisecond
	// slicesMax is how many rounds of slices a run has.
	slicesMax = 8
	// foreignMax is the share of the processors that other processes may take in a slice.
	foreignMax = 0.10
	// timedPuts: one put in so many is timed.
	timedPuts = 8
)

// The counters of a run of slices.
const (
	overMutex   = "mutex-free over one mutex"
	overApart   = "two stores that share nothing over one mutex"
	cpuFree     = "mutex-free, CPU ns/put"
	cpuMutex    = "one mutex, CPU ns/put"
	p999Free    = "mutex-free, p99.9 us"
	p999Mutex   = "one mutex, p99.9 us"
	slicesTaken = "slices"
)

// path is one of the ways to write that are compared: its writers are spread over its stores.
type path struct {
	stores   []engines.Engine
	sessions []engines.Session
	rates    []float64 // of the slices that were taken
	cpu      []float64 // of the same, ns for each put
	dropped  *path     // what the other slices measured: used if no slice was taken
	latency  []*harness.Recorder
}

func (s sliced) run(r *harness.Run) (err error) {
	if r.Smoke {
		s.buffer = smokeBuffer
	}
	open := func(name string, oneMutex bool) (engines.Engine, error) {
		o := engines.Options{Dir: filepath.Join(r.Dir, name), BufferBytes: s.buffer, Buffers: 8, Memtable: s.buffer, CacheBytes: 64 << 20, OneMutex: oneMutex}
		if err := os.Mkdir(o.Dir, 0o755); err != nil {
			return nil, err
		}
		return engines.EpochKV(o)
	}
	var opened []engines.Engine
	defer func() {
		for _, e := range opened {
			err = errors.Join(err, e.Close())
		}
	}()
	for _, name := range []string{"mutex", "free", "apart"} {
		e, err := open(name, name == "mutex")
		if err != nil {
			return err
		}
		opened = append(opened, e)
	}
	paths := []*path{{stores: opened[1:2]}, {stores: opened[:1]}, {stores: opened[1:3]}}
	var next atomic.Uint64
	for _, p := range paths {
		if err := p.begin(r.Point); err != nil {
			return err
		}
		if err := p.slice(&next, s.rotates); err != nil { // the first touches tables and segments
			return err
		}
		p.rates, p.cpu, p.dropped = nil, nil, &path{}
	}
	err = r.TimeCounted(func() (int, error) {
		for round := range slicesMax {
			for i := range paths {
				r.Quiet()
				if err := paths[(i+round)%len(paths)].slice(&next, s.rotates); err != nil {
					return 0, err
				}
			}
			if r.Smoke {
				break
			}
		}
		return int(next.Load()), nil
	})
	if err != nil {
		return err
	}
	s.report(r, paths[0], paths[1], paths[2])
	return s.verify(r, paths, next.Load())
}

func (s sliced) report(r *harness.Run, free, mutex, apart *path) {
	r.Count(slicesTaken, float64(len(free.rates)))
	r.Count(overMutex, median(free.measured().rates)/median(mutex.measured().rates))
	r.Count(overApart, median(apart.measured().rates)/median(mutex.measured().rates))
	r.Count(cpuFree, median(free.measured().cpu))
	r.Count(cpuMutex, median(mutex.measured().cpu))
	r.Count(p999Free, harness.P999(free.latency...))
	r.Count(p999Mutex, harness.P999(mutex.latency...))
	r.Latencies(free.latency...)
}

// verify counts the records of all stores: each put is one.
func (s sliced) verify(r *harness.Run, paths []*path, puts uint64) error {
	commits := 0.0
	for _, p := range paths[1:] {
		for _, e := range p.stores {
			commits += e.Counters()["commits"]
		}
	}
	for _, p := range paths {
		for _, session := range p.sessions {
			if err := session.Close(); err != nil {
				return err
			}
		}
	}
	return r.Verified(int(commits), int(puts))
}

func (p *path) begin(writers int) error {
	p.dropped = &path{}
	for w := range writers {
		session, err := p.stores[w%len(p.stores)].Session()
		if err != nil {
			return err
		}
		p.sessions, p.latency = append(p.sessions, session), append(p.latency, harness.NewRecorder())
	}
	return nil
}

// slice lets all writers put for the time of a slice.
func (p *path) slice(next *atomic.Uint64, rotates bool) error {
	rotations, usage, began := p.rotations(), readUsage(), time.Now()
	counts, errs := make([]int, len(p.sessions)), make([]error, len(p.sessions))
	var stop atomic.Bool
	var group sync.WaitGroup
	for w, session := range p.sessions {
		group.Go(func() { counts[w], errs[w] = write(session, next, &stop, p.latency[w]) })
	}
	time.Sleep(sliceTime)
	stop.Store(true)
	group.Wait()
	elapsed, used := time.Since(began), readUsage().since(usage)
	if err := errors.Join(errs...); err != nil {
		return err
	}
	puts := 0
	for _, n := range counts {
		puts += n
	}
	foreign := float64(used.all-used.own) / float64(elapsed) / float64(runtime.NumCPU())
	if foreign > foreignMax || !rotates && p.rotations() != rotations {
		p = p.dropped
	}
	p.rates, p.cpu = append(p.rates, float64(puts)/elapsed.Seconds()), append(p.cpu, float64(used.own)/float64(puts))
	return nil
}

// measured is what the slices that were taken measured, or all others if there is none.
func (p *path) measured() *path {
	if len(p.rates) == 0 {
		return p.dropped
	}
	return p
}

func (p *path) rotations() (sum float64) {
	for _, e := range p.stores {
		sum += e.Counters()["rotations"]
	}
	return sum
}

// write puts records of the origin's size: random keys of 20 bytes, and values of 12. Numbers are claimed many at a time,
// so that the writers share no counter that shows.
func write(s engines.Session, next *atomic.Uint64, stop *atomic.Bool, latency *harness.Recorder) (puts int, err error) {
	const claim = 64
	key, value := make([]byte, 20), make([]byte, 12)
	for !stop.Load() {
		first := next.Add(claim) - claim
		for i := range uint64(claim) {
			if err := putTimed(s, key, value, first+i, i%timedPuts == 0, latency); err != nil {
				return puts, err
			}
			puts++
		}
	}
	return puts, nil
}

func putTimed(s engines.Session, key, value []byte, i uint64, timed bool, latency *harness.Recorder) error {
	binary.BigEndian.PutUint64(key, i*0x9e3779b97f4a7c15)
	binary.BigEndian.PutUint64(key[8:], i)
	if !timed {
		return s.Put(key, value)
	}
	began := time.Now()
	err := s.Put(key, value)
	latency.Record(time.Since(began))
	return err
}

func median(values []float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// usage is processor time: of all processes, and of this one.
type usage struct{ all, own time.Duration }

func (u usage) since(before usage) usage { return usage{u.all - before.all, u.own - before.own} }

// readUsage reads /proc/stat, in hundredths of a second, and this process's own time.
func readUsage() (u usage) {
	text, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(text), "\n")
	for i, field := range strings.Fields(line) {
		const idle, iowait = 4, 5
		if n, err := strconv.ParseInt(field, 10, 64); err == nil && i != idle && i != iowait && i <= 8 {
			u.all += time.Duration(n) * (time.Second / 100)
		}
	}
	var own unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &own) == nil {
		u.own = time.Duration(own.Utime.Nano() + own.Stime.Nano())
	}
	return u
}

// slicedScenario is the comparison with or without rotations and merges.
func slicedScenario(name string, s sliced, about string) harness.Scenario {
	const arm = "both, in slices"
	source := "at least 1.2 at 2, 1.4 at 4 and 1.3 at 8 writers, no loss at 1"
	figure := func(writers int, atLeast float64) harness.Figure {
		return harness.Figure{Arm: arm, Measure: overMutex, Points: []int{writers}, AtLeast: atLeast, Source: source}
	}
	return harness.Scenario{
		Name: name, About: fmt.Sprintf("The mutex-free commit path against the same under one mutex, both stores open, in slices of %v. %s", sliceTime, about),
		Unit: "puts", Axis: writers, Size: 1, Fixed: true, Weight: 2, Show: overMutex,
		Arms:    []harness.Arm{{Name: arm, Run: s.run}},
		Figures: []harness.Figure{figure(1, 0.98), figure(2, 1.2), figure(4, 1.4), figure(8, 1.3)},
	}
}

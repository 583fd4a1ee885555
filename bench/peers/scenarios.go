package peers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
)

const (
	loaded = 100_000
	// window is how long a run is timed. The budget may make it shorter.
	window = time.Second
)

// The stages: what runs one after the other on the same servers.
const (
	stagePoints = "peers-points"
	stageRanges = "peers-ranges"
	stageMixed  = "peers-mixed"
)

var (
	callersAxis = harness.Axis{Name: "callers", Points: []int{1, 16, callersMany, callersMax}}
	flightAxis  = harness.Axis{Name: "in flight", Points: []int{64, 1024}}
	shareAxis   = harness.Axis{Name: "% of the slowest", Points: []int{50, 80}}
)

// Scenarios are the comparisons over the wire, stage by stage, since servers end with their stage.
func Scenarios() []harness.Scenario {
	reading, writing := readers(false), writers(false)
	swaps := closedLoop("peers-swap", "Compare-and-swap: one condition, one put.", "swaps", stagePoints, writing, swapOwn)
	swaps.Figures = []harness.Figure{{
		Arm: "epochkv", Against: "etcd", Points: []int{callersMany}, AtLeast: 4, Source: "at least 4 times etcd 3.7 [12.6k/s]",
	}}
	gets := closedLoop("peers-get", "Gets of one record.", "gets", stagePoints, append(reading, epochKVGRPCKind()), getAny)
	gets.Figures = []harness.Figure{
		atLeast(1.4, "echo", callersMany, callersMax), atLeast(1.2, "redis-always", callersMany, callersMax), atLeast(4, "etcd", callersMany, callersMax),
	}
	puts := closedLoop("peers-put", "Puts over one record.", "puts", stagePoints, append(writing, epochKVGRPCKind()), putOwn)
	puts.Figures = []harness.Figure{atLeast(4, "etcd", callersMany), atLeast(1, "redis-always", 16, callersMany, callersMax)}
	all := []harness.Scenario{
		gets,
		puts,
		closedLoop("peers-batch", fmt.Sprintf("Atomic batches of %d puts.", batchSize), "batches", stagePoints, writing, putBatch),
		swaps,
		streams("peers-stream-get", "Gets, streamed on one connection.", "gets", reading, false),
		streams("peers-stream-put", "Puts, streamed on one connection.", "puts", writing, true),
		openLoop("peers-open-get", "Gets that arrive at a fixed rate.", "gets", getAny),
		openLoop("peers-open-put", "Puts that arrive at a fixed rate.", "puts", putOwn),

		closedLoop("peers-range", fmt.Sprintf("Ranges of %d records.", rangeSize), "ranges", stageRanges, readers(true), scanRange),
		ycsbE.scenario(stageRanges, durables(true)),
	}
	for _, m := range []mix{ycsbA, ycsbB, ycsbC, ycsbD, ycsbF} {
		all = append(all, m.scenario(stageMixed, durables(false)))
	}
	return append(all, stalled(), delivered(), resumed(), burst(), steadily(), keptAlive(), history())
}

// atLeast is a bar for EpochKV over another server.
func atLeast(ratio float64, against string, callers ...int) harness.Figure {
	return harness.Figure{Arm: "epochkv", Against: against, Points: callers, AtLeast: ratio, Source: fmt.Sprintf("at least %v of %s", ratio, against)}
}

func (m mix) scenario(stage string, kinds []kind) harness.Scenario {
	return closedLoop("peers-ycsb-"+m.name, "YCSB "+m.name+": "+m.about+".", "operations", stage, kinds, m.do)
}

// durables are the servers that answer a write once it is synced.
func durables(indexed bool) []kind {
	return []kind{epochKVKind(), etcdKind(), redisKind("always", durable, indexed)}
}

// readers have nothing to sync, so that one Redis is enough.
func readers(indexed bool) []kind { return append(durables(indexed), echoKind()) }

func writers(indexed bool) []kind {
	return append(readers(indexed), epochKVAsyncKind(), redisKind("everysec", deferred, indexed))
}

func scenario(name, about, unit, stage string, axis harness.Axis, kinds []kind, l load) harness.Scenario {
	s := harness.Scenario{
		Name: name, About: about, Unit: unit, Axis: axis, Size: loaded, Window: window, Stage: stage,
		Weight: float64(len(axis.Points) * len(kinds)),
	}
	for _, k := range kinds {
		s.Arms = append(s.Arms, harness.Arm{Name: k.name, Run: arm{k, l}.run})
	}
	return s
}

func point(p int) int { return p }

func always(n int) func(int) int { return func(int) int { return n } }

// closedLoop is a scenario of callers that wait for their answers.
func closedLoop(name, about, unit, stage string, kinds []kind, do work) harness.Scenario {
	run := func(ctx context.Context, r *harness.Run, s *server, callers []*caller) error {
		err := closed(ctx, callers, do, r.Window, byServer(r, s))
		r.Latencies(recorded(callers))
		return err
	}
	return scenario(name, about, unit, stage, callersAxis, kinds, load{callers: point, inFlight: point, run: run})
}

// streams is a scenario of one caller that does not wait for answers.
func streams(name, about, unit string, kinds []kind, put bool) harness.Scenario {
	run := func(ctx context.Context, r *harness.Run, s *server, callers []*caller) error {
		err := streamed(ctx, callers[0], r.Point, put, r.Window, byServer(r, s))
		r.Latencies(recorded(callers))
		return err
	}
	return scenario(name, about, unit, stagePoints, flightAxis, kinds, load{callers: always(1), inFlight: point, run: run})
}

// openLoop is a scenario of requests that arrive whether or not those before are answered, at a share of the rate that the slowest
// durable server sustains.
func openLoop(name, about, unit string, do work) harness.Scenario {
	kinds := durables(false)
	s := scenario(name, about, unit, stagePoints, shareAxis, kinds, load{})
	for i, k := range kinds {
		s.Arms[i].Run = func(r *harness.Run) error {
			slowest, err := slowestOf(r, kinds, name, do)
			if err != nil {
				return err
			}
			l := load{callers: always(callersMany), inFlight: always(callersMany), run: arriving(slowest*float64(r.Point)/100, do)}
			return arm{k, l}.run(r)
		}
	}
	return s
}

// arriving is the run of a load that arrives at a rate.
func arriving(rate float64, do work) runLoad {
	return func(ctx context.Context, r *harness.Run, s *server, callers []*caller) error {
		r.Count("arrivals/s", rate)
		var latencies []*harness.Recorder
		var late *harness.Recorder
		err := byServer(r, s)(func() (int, error) {
			var ended atomic.Int64
			var err error
			latencies, late, err = harness.OpenLoop(rate, r.Window, len(callers), func(c int) error {
				ended.Add(1)
				return do(ctx, callers[c])
			})
			return int(ended.Load()), err
		})
		if err != nil {
			return err
		}
		r.Latencies(latencies...)
		r.Lateness(late)
		return nil
	}
}

// calibration is how long each server is tried before arrivals are planned.
const calibration = 400 * time.Millisecond

// perSecond is what a calibration found.
type perSecond float64

// Close has nothing to end: a rate is shared between runs as servers are.
func (perSecond) Close() error { return nil }

// slowestOf is what the slowest of the servers does in a closed loop.
func slowestOf(r *harness.Run, kinds []kind, name string, do work) (float64, error) {
	var servers []*server
	for _, k := range kinds {
		s, err := shared(r, k)
		if errors.Is(err, harness.ErrAbsent) {
			continue
		}
		if err != nil {
			return 0, err
		}
		servers = append(servers, s)
	}
	slowest, err := harness.Shared(r, "rate of "+name, func(string) (perSecond, error) {
		slowest := math.Inf(1)
		for _, s := range servers {
			rate, err := s.calibrate(r, do)
			if err != nil {
				return 0, err
			}
			slowest = min(slowest, rate)
		}
		return perSecond(slowest), nil
	})
	return float64(slowest), err
}

func (s *server) calibrate(r *harness.Run, do work) (rate float64, err error) {
	if err := s.resume(); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, s.pause()) }()
	try := calibration
	if r.Smoke {
		try = r.Window
	}
	err = closed(r, s.callers(r.Seed, callersMany), do, try, func(section func() (int, error)) error {
		began := time.Now()
		n, err := section()
		rate = float64(n) / time.Since(began).Seconds()
		return err
	})
	return max(rate, 1), err
}

// byServer times what the server of a run does.
func byServer(r *harness.Run, s *server) timer {
	return func(section func() (int, error)) error { return r.TimeServer(s.pid, section) }
}

package peers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/epochkv/epochkv/bench/harness"
)

const (
	laggingWatches = "watches that lag"
	watchMemory    = "MiB for watches"
	noWatch        = ", no watch" // ends the name of an arm
	watchedRecords = 20_000
	stallTimeout   = 2 * time.Minute
	// Puts go on before they are measured, in rounds, until the server has delivered nothing in one of them. In this time the buffers
	// on the way to the watches fill: until then the clients take something. A thousand streams took seven seconds of two cores that
	// nothing else used, with up to four times the processor time for each put. Servers without watches write for as many rounds as is usual.
	stallRound     = 4 * time.Second
	stallRoundsMin = 2
	stallRoundsMax = 10
	// stallWindowMin is the shortest time that is measured. The clients of a thousand streams hold what they have not taken in this process,
	// whose garbage collector takes a tenth of a second for it: in windows of that length it decided the figure.
	stallWindowMin  = 3 * time.Second
	eventsInWindow  = "events delivered meanwhile"
	smokeWatchesMax = 10
)

// feedMemoryMiB is what the server promises: --feed-memory, and for each stream a response of 256 KiB and a watch of 1 KiB.
func feedMemoryMiB(streams int) float64 { return 64 + float64(streams)*257/1024 }

// stalled measures puts beside watches of everything whose clients take nothing.
func stalled() harness.Scenario {
	axis := harness.Axis{Name: "stalled watches", Points: []int{1, 100, 1000}}
	s := scenario("watch-stalled", fmt.Sprintf("Durable puts over one record by %d callers, beside watches of everything whose clients take nothing: each has a stream of its own.",
		callersMany), "puts", "", axis, nil, load{})
	s.Size, s.Weight = watchedRecords, 8*float64(len(axis.Points))
	etcdPoints := axis.Points[:2] // with a thousand watches its streams still take something after two minutes
	s.Arms = []harness.Arm{
		stalledArm(epochKVKind(), nil, false), stalledArm(epochKVKind(), nil, true),
		stalledArm(etcdKind(), etcdPoints, false), stalledArm(etcdKind(), etcdPoints, true),
	}
	s.Figures = []harness.Figure{
		{Arm: "epochkv", Against: "epochkv" + noWatch, AtLeast: 0.98, Source: "within 2 % of none"},
		{Arm: "epochkv", Against: "epochkv" + noWatch, Measure: harness.MeasureP99, AtMost: 1.02, Source: "within 2 % of none"},
	}
	for _, n := range axis.Points {
		s.Figures = append(s.Figures, harness.Figure{
			Arm: "epochkv", Points: []int{n}, Measure: watchMemory, AtMost: feedMemoryMiB(n), Source: "--feed-memory, a response for each stream and 1 KiB for each watch",
		})
	}
	return s
}

// untimed is a timer of what nothing is asked about.
func untimed(section func() (int, error)) error {
	_, err := section()
	return err
}

// stalledArm is a server with the stalled watches of the axis, or without any. For the sake of its memory it is a server of its own
// for each point; nil points are all of them.
func stalledArm(k kind, points []int, alone bool) harness.Arm {
	name := k.name
	if alone {
		name += noWatch
	}
	return harness.Arm{Name: name, Points: points, Run: func(r *harness.Run) error {
		own := k
		own.name = fmt.Sprintf("%s at %d", name, r.Point)
		run := func(ctx context.Context, r *harness.Run, s *server, callers []*caller) error {
			if alone {
				return putBesideStalled(ctx, r, s, callers, 0)
			}
			return putBesideStalled(ctx, r, s, callers, r.Point)
		}
		return arm{own, load{callers: always(callersMany), inFlight: always(callersMany), run: run}}.run(r)
	}}
}

func putBesideStalled(ctx context.Context, r *harness.Run, s *server, callers []*caller, n int) (err error) {
	if r.Smoke {
		n = min(n, smokeWatchesMax)
	}
	end, f, err := s.stall(ctx, n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, end()) }()
	window, most := r.Window, math.MaxFloat64
	if !r.Smoke { // without watches too, so that all servers of a round have done as much
		window, most = max(window, stallWindowMin), 0
		if err := s.fillBuffers(ctx, r, f); err != nil {
			return err
		}
	}
	before, err := f.delivered(ctx)
	if err != nil {
		return err
	}
	runtime.GC() // of what the rounds before have left
	if err := closed(ctx, callers, putOwn, window, byServer(r, s)); err != nil {
		return err
	}
	r.Latencies(recorded(callers))
	if err := countWatchMemory(r, s, n); err != nil {
		return err
	}
	after, err := f.delivered(ctx)
	if err != nil {
		return err
	}
	if err := r.Prove(eventsInWindow, after-before, 0, most); err != nil {
		return err
	}
	got, err := f.lagging(ctx)
	if err != nil {
		return err
	}
	return r.Prove(laggingWatches, float64(got), float64(n), float64(n))
}

// fillBuffers puts until no watch takes anything any more.
func (s *server) fillBuffers(ctx context.Context, r *harness.Run, f feed) error {
	for round := uint64(1); round <= stallRoundsMax; round++ {
		before, err := f.delivered(ctx)
		if err != nil {
			return err
		}
		if err := closed(ctx, s.callers(r.Seed+round, callersMany), putOwn, stallRound, untimed); err != nil {
			return err
		}
		after, err := f.delivered(ctx)
		if err != nil || round >= stallRoundsMin && after == before {
			return err
		}
	}
	return fmt.Errorf("the watches still take something after %v of puts", stallRoundsMax*stallRound)
}

// residentMemory is what a server without a watch had last, in MiB.
type residentMemory struct{ mib float64 }

// Close has nothing to end: a number is shared between runs as servers are.
func (*residentMemory) Close() error { return nil }

// countWatchMemory compares the server with the one that has no watch, which has done as much.
func countWatchMemory(r *harness.Run, s *server, watches int) error {
	key := "memory of " + strings.Replace(s.kind.name, noWatch, "", 1) + noWatch
	without, err := harness.Shared(r, key, func(string) (*residentMemory, error) { return &residentMemory{}, nil })
	if err != nil {
		return err
	}
	mib, err := s.resident()
	if watches == 0 {
		without.mib = mib
	}
	r.Count(watchMemory, max(mib-without.mib, 0))
	return err
}

// stall opens so many watches of everything that take nothing, and writes until the server counts all of them as lagging.
func (s *server) stall(ctx context.Context, n int) (end func() error, f feed, err error) {
	f, err = s.kind.feed(s, n)
	if err != nil {
		return nil, nil, err
	}
	watching, cancel := context.WithCancel(ctx)
	end = func() error { cancel(); return f.close() }
	for range n {
		if _, err := f.watch(watching, nil); err != nil {
			return nil, nil, errors.Join(err, end())
		}
	}
	if err := s.outrun(ctx, f, n); err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return end, f, nil
}

// outrun writes the loaded records again, as they are, until so many watches lag.
func (s *server) outrun(ctx context.Context, f feed, n int) error {
	ctx, cancel := context.WithTimeoutCause(ctx, stallTimeout, fmt.Errorf("fewer than %d watches lag after %v of writes", n, stallTimeout))
	defer cancel()
	for from := 0; ; from = (from + batchSize) % len(s.order) {
		if from%(10*batchSize) == 0 {
			lagging, err := f.lagging(ctx)
			if lagging == n || err != nil {
				return err
			}
		}
		var keys, values [][]byte
		for i := from; i < min(from+batchSize, len(s.order)); i++ {
			keys, values = append(keys, s.records.key(i)), append(values, value(i, s.records.versions[i].Load()))
		}
		if err := s.stores[0].putAll(ctx, keys, values); err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

// resident is the memory that the server has, in MiB.
func (s *server) resident() (float64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := strings.Cut(string(text), "\nVmRSS:")
	number, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	kib, err := strconv.ParseFloat(number, 64)
	return kib / 1024, err
}

package peers

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"epochkv/bench/harness"
)

// arm is a server under a load.
type arm struct {
	kind kind
	load load
}

// load is what a scenario asks of a server. Its run times the server and records latencies.
type load struct {
	callers  func(point int) int
	inFlight func(point int) int // requests at once, at most
	run      runLoad
}

type runLoad func(ctx context.Context, r *harness.Run, s *server, callers []*caller) error

const (
	// runTimeout ends a run that hangs.
	runTimeout = time.Minute
	// clientGCPercent makes the load generator collect garbage rarely: at the default it spends a fifth of its time on it, which is
	// the servers' time too, on the same processors.
	clientGCPercent = 800
)

func (a arm) run(r *harness.Run) (err error) {
	s, err := shared(r, a.kind)
	if err != nil {
		return err
	}
	if err := s.resume(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.pause()) }()
	ctx, cancel := context.WithTimeoutCause(r, r.Window+runTimeout, fmt.Errorf("no end within %v", runTimeout))
	defer cancel()

	defer debug.SetGCPercent(debug.SetGCPercent(clientGCPercent))
	before, counts, err := s.counted(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	callers := s.callers(r.Seed, a.load.callers(r.Point))
	if err := a.load.run(ctx, r, s, callers); err != nil {
		return err
	}
	commits := 0
	for _, c := range callers {
		commits += c.commits
	}
	if counts {
		after, _, err := s.counted(ctx)
		if err != nil {
			return err
		}
		err = a.proveSyncs(r, after-before, commits, time.Since(began))
		if err != nil {
			return err
		}
	} else if err := a.proveWritten(r, commits); err != nil {
		return err
	}
	return s.verify(ctx, r, callers)
}

// asyncSyncsMax is far above the twenty syncs a second that asynchronous commits ask for.
const asyncSyncsMax = 100

// proveSyncs checks that a durable server has synced for its commits: one sync serves those in flight and no more. And that the
// other did not.
func (a arm) proveSyncs(r *harness.Run, syncs float64, commits int, took time.Duration) error {
	low, high := 0.0, math.Inf(1)
	switch a.kind.durability {
	case durable:
		low = float64(commits / a.load.inFlight(r.Point))
	case deferred:
		high = asyncSyncsMax * (took.Seconds() + 1)
	}
	return r.Prove("syncs", syncs, low, high)
}

// proveWritten is for servers that count no syncs: after each one, the next append makes a page of the file dirty anew.
func (a arm) proveWritten(r *harness.Run, commits int) error {
	if a.kind.hollow {
		return nil
	}
	const page = 4096
	low := 0.0
	if a.kind.durability == durable && !r.Smoke { // where scratch lies in memory nothing is written, which a smoke run need not mind
		// Half, less a few, as commits include those before the section that the bytes are of.
		low = float64(commits/a.load.inFlight(r.Point)/2-10) * page
	}
	return r.Prove("bytes written", r.WrittenBytes(), low, math.Inf(1))
}

const (
	sampled   = counters // written records that are read back
	verifiers = 32
)

// verify reads back what the run wrote. What it read has been looked at already.
func (s *server) verify(ctx context.Context, r *harness.Run, callers []*caller) error {
	if s.kind.hollow {
		return r.Verified(0, 0)
	}
	var wrote []int
	for _, c := range callers {
		wrote = append(wrote, c.wrote...)
	}
	slices.Sort(wrote)
	wrote = slices.Compact(wrote)
	step := max(len(wrote)/sampled, 1)
	var right, want atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for v := range verifiers {
		group.Go(func() error {
			for at := v * step; at < len(wrote); at += verifiers * step {
				i := wrote[at]
				expected := s.records.versions[i].Load()
				got, err := s.stores[v%len(s.stores)].get(ctx, s.records.key(i))
				if err != nil {
					return err
				}
				version, err := check(i, got, expected)
				if err != nil {
					return err
				}
				want.Add(1)
				if version == expected {
					right.Add(1)
				}
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("read back: %w", err)
	}
	return r.Verified(int(right.Load()), int(want.Load()))
}

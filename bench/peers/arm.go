package peers

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/epochkv/epochkv/bench/harness"
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
	proof, err := a.watch(ctx, s)
	if err != nil {
		return err
	}
	callers := s.callers(r.Seed, a.load.callers(r.Point))
	if err := a.load.run(ctx, r, s, callers); err != nil {
		return err
	}
	if err := proof(r, commits(callers)); err != nil {
		return err
	}
	return s.verify(ctx, r, callers)
}

const (
	sampled   = counters // written records that are read back
	verifiers = 32
)

// verify reads back what the run wrote. What it read has been looked at already.
func (s *server) verify(ctx context.Context, r *harness.Run, callers []*caller) error {
	if s.kind.hollow() {
		return r.Verified(0, 0)
	}
	wrote := s.written(callers)
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

// written lists each record that the callers wrote once.
func (s *server) written(callers []*caller) (records []int) {
	seen := make([]bool, s.records.claimed.Load())
	for _, c := range callers {
		for _, i := range c.wrote {
			if !seen[i] {
				seen[i] = true
				records = append(records, i)
			}
		}
	}
	return records
}

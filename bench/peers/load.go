package peers

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/bench/workload"
)

const (
	// callersMany are the callers of the loads whose question is not the number of callers.
	callersMany = 64
	// callersMax is the most callers of any load.
	callersMax = 256
)

// caller is one of those that send requests. It belongs to one goroutine.
type caller struct {
	*server
	store   store
	id, of  int // which of how many
	version uint64
	random  *rand.Rand
	zipf    *workload.Zipf

	commits   int   // that were acknowledged
	wrote     []int // records
	latencies []time.Duration
	done      atomic.Int64 // operations in the timed section
	_         [64]byte     // callers do not share a line
}

// work is one operation of a caller.
type work func(ctx context.Context, c *caller) error

// callers makes the callers of a run.
func (s *server) callers(seed uint64, n int) []*caller {
	s.runs++
	zipf := workload.NewZipf(nil, len(s.order), workload.SkewYCSB)
	all := make([]*caller, n)
	for i := range all {
		random := rand.New(rand.NewPCG(seed, uint64(i)))
		all[i] = &caller{
			server: s, store: s.stores[i%len(s.stores)], id: i, of: n, version: generation(s.runs), random: random, zipf: zipf.With(random),
		}
	}
	return all
}

// The phases of a closed loop.
const (
	leading int32 = iota // stacks grow, connections fill; nothing is recorded
	timing
	over
)

// leadDivisor is the timed section over the lead.
const leadDivisor = 8

// timeline runs a load for a while: a lead, and the section that timed times. ops is how many operations have ended in it.
func timeline(ctx context.Context, window time.Duration, timed timer, run func(context.Context, *atomic.Int32) error, ops func() int) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var phase atomic.Int32
	ended := make(chan error, 1)
	go func() {
		err := run(ctx, &phase)
		cancel(err) // wakes the sleep below
		ended <- err
	}()
	err := sleep(ctx, window/leadDivisor)
	if err == nil {
		err = timed(func() (int, error) {
			phase.Store(timing)
			err := sleep(ctx, window)
			phase.Store(over)
			return ops(), err
		})
	}
	phase.Store(over)
	if failed := <-ended; failed != nil {
		return failed
	}
	return err
}

// timer times a section that says how many operations it did.
type timer func(section func() (ops int, err error)) error

// closed runs callers in a closed loop. An operation counts if it ends within the timed section, and its latency if it
// begins there.
func closed(ctx context.Context, callers []*caller, do work, window time.Duration, timed timer) error {
	run := func(ctx context.Context, phase *atomic.Int32) error {
		group, ctx := errgroup.WithContext(ctx)
		for _, c := range callers {
			group.Go(func() error { return c.loop(ctx, phase, do) })
		}
		return group.Wait()
	}
	return timeline(ctx, window, timed, run, func() int { return sum(callers) })
}

func (c *caller) loop(ctx context.Context, phase *atomic.Int32, do work) error {
	for now := phase.Load(); now != over && ctx.Err() == nil; now = phase.Load() {
		began := time.Now()
		if err := do(ctx, c); err != nil {
			return err
		}
		if now == timing {
			c.latencies = append(c.latencies, time.Since(began))
		}
		if phase.Load() == timing {
			c.done.Add(1)
		}
	}
	return nil
}

func sum(callers []*caller) (n int) {
	for _, c := range callers {
		n += int(c.done.Load())
	}
	return n
}

func commits(callers []*caller) (n int) {
	for _, c := range callers {
		n += c.commits
	}
	return n
}

// sleep returns early when ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// recorded are the latencies of all callers.
func recorded(callers []*caller) *harness.Recorder {
	into := harness.NewRecorder()
	for _, c := range callers {
		for _, d := range c.latencies {
			into.Record(d)
		}
	}
	return into
}

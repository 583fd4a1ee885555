package peers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/epochkv/epochkv/bench/harness"
	"github.com/epochkv/epochkv/client"
)

const (
	catchUpSeconds = "seconds to catch up"
	putP99Ratio    = "put p99 over that before"
	// besideRate is the load of puts beside what is measured: little enough that the server has time for both.
	besideRate    = 5000.0
	besideCallers = 16
	backlogFlight = 1024
)

// resumed measures a watch that begins at an old epoch.
func resumed() harness.Scenario {
	s := scenario("watch-resume", fmt.Sprintf("A watch of everything that begins after an old epoch, until it has every commit from there, beside %.0f durable puts/s.",
		besideRate), "epochs", "", harness.Axis{Name: "watches", Points: []int{1}}, nil, load{})
	s.Size, s.Window, s.Fixed = 500_000, 0, true
	k := epochKVKind()
	s.Arms = []harness.Arm{{Name: k.name, Run: func(r *harness.Run) error {
		return onServer(r, k, resume)
	}}, putsAlone(k)}
	s.Figures = []harness.Figure{
		{Arm: k.name, Measure: catchUpSeconds, AtMost: 2, Source: "500,000 epochs in 2 s"},
		{Arm: k.name, Measure: putP99Ratio, AtMost: 1.1, Source: "put p99 at most 1.1 times"},
	}
	return s
}

// onServer runs a measurement of EpochKV alone on a shared server of the kind with watchedRecords.
func onServer(r *harness.Run, k kind, measure func(context.Context, *harness.Run, *server) error) (err error) {
	binary, err := k.binary(r)
	if err != nil {
		return err
	}
	s, err := harness.Shared(r, k.name, func(dir string) (*server, error) { return open(r, k, binary, dir, watchedRecords) })
	if err != nil {
		return err
	}
	if err := s.resume(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.pause()) }()
	ctx, cancel := context.WithTimeoutCause(r, runTimeout, fmt.Errorf("no end within %v", runTimeout))
	defer cancel()
	return measure(ctx, r, s)
}

// client is the server's first client.
func (s *server) client() *client.Client { return s.stores[0].(epochKV).Client }

// beside puts at a fixed rate until done is closed, and returns how long the puts took.
func (s *server) beside(ctx context.Context, seed uint64, done <-chan struct{}) (*harness.Recorder, error) {
	callers := s.callers(seed, besideCallers)
	group, ctx := errgroup.WithContext(ctx)
	for _, c := range callers {
		group.Go(func() error {
			ticker := time.NewTicker(time.Duration(besideCallers / besideRate * float64(time.Second)))
			defer ticker.Stop()
			for {
				select {
				case <-done:
					return nil
				case <-ctx.Done():
					return context.Cause(ctx)
				case <-ticker.C:
				}
				began := time.Now()
				if err := putOwn(ctx, c); err != nil {
					return err
				}
				c.latencies = append(c.latencies, time.Since(began))
			}
		})
	}
	err := group.Wait()
	return recorded(callers), err
}

// alone is beside for a while in which nothing else is done.
func (s *server) alone(ctx context.Context, r *harness.Run) (*harness.Recorder, error) {
	return s.aloneDuring(ctx, r, aloneFor(r))
}

func (s *server) aloneDuring(ctx context.Context, r *harness.Run, d time.Duration) (*harness.Recorder, error) {
	done := make(chan struct{})
	time.AfterFunc(d, func() { close(done) })
	return s.beside(ctx, r.Seed, done)
}

func aloneFor(r *harness.Run) time.Duration {
	if r.Smoke {
		return 50 * time.Millisecond
	}
	return 2 * time.Second
}

// against times a section of the server with puts beside it, and compares their latencies with those before.
func (s *server) against(ctx context.Context, r *harness.Run, before *harness.Recorder, section func() (ops int, err error)) error {
	var meanwhile *harness.Recorder
	done := make(chan struct{})
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() (err error) {
		meanwhile, err = s.beside(ctx, r.Seed+1, done)
		return err
	})
	group.Go(func() error {
		defer close(done)
		return byServer(r, s)(section)
	})
	if err := group.Wait(); err != nil {
		return err
	}
	r.Latencies(meanwhile)
	r.Count(putP99Ratio, float64(harness.Percentile(99, meanwhile))/float64(harness.Percentile(99, before)))
	return nil
}

// putsAlone is the arm that says how much the latency of puts varies by itself: nothing is done beside them before or after.
func putsAlone(k kind) harness.Arm {
	return harness.Arm{Name: "puts alone", Run: func(r *harness.Run) error {
		return onServer(r, k, func(ctx context.Context, r *harness.Run, s *server) error {
			before, err := s.alone(ctx, r)
			if err != nil {
				return err
			}
			err = s.against(ctx, r, before, func() (int, error) { return 1, sleep(ctx, aloneFor(r)) })
			if err != nil {
				return err
			}
			return r.Verified(0, 0) // nothing but puts, each of which was acknowledged
		})
	}}
}

func resume(ctx context.Context, r *harness.Run, s *server) error {
	before, err := s.alone(ctx, r)
	if err != nil {
		return err
	}
	from, through, err := s.backlog(ctx, r.Size)
	if err != nil {
		return err
	}
	f := &backlogReader{from: uint64(from), through: uint64(through), records: s.records}
	err = s.against(ctx, r, before, func() (int, error) { return r.Size, f.read(ctx, s) })
	if err != nil {
		return err
	}
	r.Count(catchUpSeconds, r.Seconds())
	if err := r.Prove("commits received", float64(f.commits), float64(r.Size), float64(r.Size)); err != nil {
		return err
	}
	return r.Verified(f.commits, r.Size)
}

// backlog puts so many times, one commit each, and returns the epoch before the first and the one of the last.
func (s *server) backlog(ctx context.Context, size int) (from, through client.Epoch, err error) {
	if from, err = s.client().Put(ctx, s.records.key(0), value(0, s.records.versions[0].Load()), client.Sync()); err != nil {
		return 0, 0, err
	}
	p, err := s.client().Pipeline(ctx, client.PipelineOptions{InFlight: backlogFlight})
	if err != nil {
		return 0, 0, err
	}
	var failed firstError
	var mu sync.Mutex
	for n := range size {
		i := n % len(s.order)
		err = p.Put(s.records.key(i), value(i, s.records.versions[i].Load()), func(e client.Epoch, err error) {
			failed.set(err)
			mu.Lock()
			defer mu.Unlock()
			through = max(through, e)
		})
		if err != nil {
			break
		}
	}
	err = errors.Join(err, p.Close(), failed.get())
	return from, through, err
}

// backlogReader reads the commits (from, through].
type backlogReader struct {
	from, through uint64
	records       *records
	commits       int
}

func (b *backlogReader) read(ctx context.Context, s *server) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	opened, err := dialEpochKVFeed(s, 1)
	if err != nil {
		return err
	}
	f := opened.(*epochKVFeed)
	stream, err := f.watchAfter(ctx, &b.from, nil)
	for last := b.from; err == nil && last < b.through; {
		err = stream.receive(func(e change) error {
			if e.epoch <= last {
				return fmt.Errorf("epoch %d came after %d", e.epoch, last)
			}
			if last = e.epoch; last > b.through {
				return nil
			}
			b.commits++
			i := b.records.number(e.key)
			if i < 0 {
				return fmt.Errorf("an event of %x, which is no record", e.key)
			}
			_, err := check(i, e.value, generation(1))
			return err
		})
	}
	return errors.Join(err, f.close())
}

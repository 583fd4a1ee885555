package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/epochkv/epochkv/client"
)

// bench is one benchmark.
type bench struct {
	benchFlags
	client *client.Client
	own    []byte // prefix of this run alone
	value  []byte
}

func newBench(c *client.Client, f benchFlags) *bench {
	b := &bench{benchFlags: f, client: c, own: fmt.Appendf(nil, "%s%016x/", f.prefix, rand.Uint64()), value: make([]byte, f.valueBytes)}
	random := rand.New(rand.NewPCG(f.seed, 0))
	for i := range b.value { // not all alike: a store that compresses would show too well
		b.value[i] = byte(random.Uint32())
	}
	return b
}

// key is the name of key i.
func (b *bench) key(i int) []byte { return fmt.Appendf(nil, "%s%08d", b.own, i) }

// loadBatch is how many keys are loaded at once, and loadBatchBytes how many bytes at most.
const (
	loadBatch      = 1000
	loadBatchBytes = 4 << 20
)

// load writes every key, for the workloads that read them.
func (b *bench) load(ctx context.Context) error {
	var batch client.Batch
	for i := range b.keys {
		batch.Put(b.key(i), b.value)
		if batch.Len() == loadBatch || batch.Bytes() >= loadBatchBytes || i == b.keys-1 {
			if _, err := b.client.Write(ctx, &batch, client.Async()); err != nil {
				return fmt.Errorf("load: %w", err)
			}
			batch.Reset()
		}
	}
	return nil
}

// cleanUpChunk bounds what one request deletes, and cleanUpTimeout the whole.
const (
	cleanUpChunk   = 10_000
	cleanUpTimeout = time.Minute
)

// leftoverError is an error that tells what a command has left. The user learns of it after an interrupt, too.
type leftoverError struct{ error }

func (e leftoverError) Unwrap() error { return e.error }

// cleanUp deletes what the benchmark wrote.
func (b *bench) cleanUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanUpTimeout)
	defer cancel()
	for {
		deleted, err := b.client.DeleteRange(ctx, client.Prefix(b.own), cleanUpChunk, client.Async())
		if err != nil {
			return leftoverError{fmt.Errorf("clean up; what is left can be deleted with: kvctl del --prefix %s: %w", b.own, err)}
		}
		if !deleted.More {
			return nil
		}
	}
}

// latencyMax is the longest latency that is told apart.
const latencyMax = time.Minute

// caller is one loop of requests.
type caller struct {
	*bench
	random    *rand.Rand
	histogram *hdrhistogram.Histogram // nanoseconds
	requests  int64
	keyCount  int64
}

func (b *bench) newCaller(number int) *caller {
	return &caller{bench: b, random: rand.New(rand.NewPCG(b.seed, uint64(number)+1)), histogram: hdrhistogram.New(1, int64(latencyMax), 3)}
}

// measure runs the workload for its time. The first error ends all callers.
func (b *bench) measure(ctx context.Context) (*benchReport, error) {
	if b.workload != benchPut && b.workload != benchBatch {
		if err := b.load(ctx); err != nil {
			return nil, err
		}
	}
	// What is under way at the end may finish: cancelling it would leave its outcome open, and count the slowest as none.
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	callers := make([]*caller, b.callers)
	var wait sync.WaitGroup
	began := time.Now()
	for i := range callers {
		callers[i] = b.newCaller(i)
		wait.Go(func() {
			if err := callers[i].loop(ctx, i, began); err != nil {
				stop(err)
			}
		})
	}
	wait.Wait()
	if err := context.Cause(ctx); err != nil && !errors.Is(err, context.Canceled) {
		return nil, err
	}
	return b.report(callers, time.Since(began)), nil
}

// loop sends requests until the time is over, or ctx ends, which is no error.
func (c *caller) loop(ctx context.Context, number int, began time.Time) error {
	run := c.request()
	end := began.Add(c.duration)
	for n := 0; ; n++ {
		due := time.Now()
		if c.rate > 0 {
			due = began.Add(time.Duration(float64(n*c.callers+number) / c.rate * float64(time.Second)))
		}
		if due.After(end) || time.Now().After(end) || !sleepUntil(ctx, due) {
			return nil
		}
		keys, err := run(ctx)
		switch {
		case err != nil && ctx.Err() != nil:
			return nil //nolint:nilerr // another caller's error, or the user's interrupt, ended it
		case err != nil:
			return err
		}
		c.record(time.Since(due))
		c.requests++
		c.keyCount += int64(keys)
	}
}

// sleepUntil reports whether due has come before ctx has ended.
func sleepUntil(ctx context.Context, due time.Time) bool {
	wait := time.Until(due)
	if wait <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

func (c *caller) record(d time.Duration) {
	// The error is for values out of range, which the clamp excludes.
	_ = c.histogram.RecordValue(int64(min(max(d, 1), latencyMax)))
}

func (b *bench) report(callers []*caller, took time.Duration) *benchReport {
	r := &benchReport{Workload: b.workload, Loop: "closed", Callers: b.callers, Asked: b.rate, Seconds: took.Seconds()}
	if b.rate > 0 {
		r.Loop = "open"
	}
	all := hdrhistogram.New(1, int64(latencyMax), 3)
	for _, c := range callers {
		all.Merge(c.histogram)
		r.Requests += c.requests
		r.Keys += c.keyCount
	}
	r.Rate, r.KeyRate = float64(r.Requests)/r.Seconds, float64(r.Keys)/r.Seconds
	us := func(ns int64) float64 { return float64(ns) / 1e3 }
	r.Latency.P50, r.Latency.P90 = us(all.ValueAtQuantile(50)), us(all.ValueAtQuantile(90))
	r.Latency.P99, r.Latency.P999 = us(all.ValueAtQuantile(99)), us(all.ValueAtQuantile(99.9))
	r.Latency.Max = us(all.Max())
	return r
}

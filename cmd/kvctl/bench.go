package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// benchFlags are what a benchmark is asked.
type benchFlags struct {
	workload    string
	duration    time.Duration
	callers     int
	rate        float64 // requests per second over all callers; 0: as fast as the answers come
	keys        int
	valueBytes  int
	batch       int
	scan        int
	readPercent int
	async       bool
	prefix      string
	seed        uint64
}

// Bounds of a benchmark: it runs beside others' work and must neither fill the server nor never end.
const (
	benchDurationMax = time.Hour
	benchCallersMax  = 4096
	benchKeysMax     = 10_000_000
	benchValueMax    = 1 << 20
	benchBatchMax    = 10_000
)

func (a *app) benchCommand() *cobra.Command {
	var f benchFlags
	cmd := &cobra.Command{
		Use:   "bench " + strings.Join(benchWorkloads, "|"),
		Short: "Load the server for a while and report throughput and latency",
		Long: `Load the server for a bounded time and report throughput and latency.

Workloads: put and get are single requests; batch writes --batch keys atomically; scan reads --scan entries from a random key
on; txn reads one key and writes another in an interactive transaction, retried on conflicts; mixed is --read-percent of gets,
the rest puts.

Without --rate the loop is closed: each caller sends its next request when the last one is answered, which measures throughput.
With --rate it is open: requests are due at a fixed rate whatever the answers do, and each latency counts from the moment at
which the request was due, so that a stall is charged to everything it delays.

The benchmark writes under its own --prefix only, in a part of it that no other run uses, and deletes that at the end, also when it is
interrupted.`,
		Example: `  kvctl bench put
  kvctl bench get --callers 64 --duration 30s
  kvctl bench mixed --rate 5000 --read-percent 90
  kvctl bench batch --batch 100 --async -o json`,
		Args:      cobra.MatchAll(cobra.ExactArgs(1), cobra.OnlyValidArgs),
		ValidArgs: benchWorkloads,
		PreRunE:   func(*cobra.Command, []string) error { return f.check() },
		RunE: func(cmd *cobra.Command, args []string) error {
			f.workload = args[0]
			return a.withClient(func(c *client.Client) error { return a.bench(cmd.Context(), c, f) })
		},
	}
	flags := cmd.Flags()
	flags.DurationVar(&f.duration, "duration", 10*time.Second, "`DURATION` in which requests are sent")
	flags.IntVar(&f.callers, "callers", 16, "at most `N` requests in flight")
	flags.Float64Var(&f.rate, "rate", 0, "send `REQUESTS_PER_SECOND`, whatever the answers do; 0 sends as they come")
	flags.IntVar(&f.keys, "keys", 10_000, "`N` keys that requests choose from")
	flags.IntVar(&f.valueBytes, "value-size", 100, "`BYTES` of a value")
	flags.IntVar(&f.batch, "batch", 100, "`N` keys in a batch")
	flags.IntVar(&f.scan, "scan", 100, "`N` entries in a scan")
	flags.IntVar(&f.readPercent, "read-percent", 50, "`PERCENT` of gets in the mixed workload")
	flags.BoolVar(&f.async, "async", false, "writes are answered once they are visible, not once they are durable")
	flags.StringVar(&f.prefix, "prefix", "kvctl-bench/", "`PREFIX` of the keys that it writes")
	flags.Uint64Var(&f.seed, "seed", 1, "`SEED` of the choice of keys")
	return cmd
}

// check finds what makes no sense before anything is sent.
func (f *benchFlags) check() error {
	for _, bound := range []struct {
		flag              string
		value, least, max int
	}{
		{"callers", f.callers, 1, benchCallersMax},
		{"keys", f.keys, 1, benchKeysMax},
		{"value-size", f.valueBytes, 0, benchValueMax},
		{"batch", f.batch, 1, min(benchBatchMax, f.keys)},
		{"scan", f.scan, 1, benchKeysMax},
		{"read-percent", f.readPercent, 0, 100},
	} {
		if bound.value < bound.least || bound.value > bound.max {
			return usageError{fmt.Errorf("--%s %d: must be from %d to %d", bound.flag, bound.value, bound.least, bound.max)}
		}
	}
	switch {
	case f.duration <= 0 || f.duration > benchDurationMax:
		return usageError{fmt.Errorf("--duration %v: must be positive and at most %v", f.duration, benchDurationMax)}
	case !(f.rate >= 0 && f.rate <= math.MaxFloat64): // NaN is neither
		return usageError{fmt.Errorf("--rate %v: must be a finite number that is not negative", f.rate)}
	case f.prefix == "":
		return usageError{errors.New("--prefix: must not be empty: it keeps the benchmark away from other keys")}
	}
	return nil
}

// bench loads, runs, cleans up and reports, and cleans up even if it fails or is interrupted.
func (a *app) bench(ctx context.Context, c *client.Client, f benchFlags) error {
	b := newBench(c, f)
	report, err := b.measure(ctx)
	if err := errors.Join(err, b.cleanUp(context.WithoutCancel(ctx))); err != nil {
		return err
	}
	return a.printBench(report)
}

// benchReport is what a benchmark measured. Its JSON is part of the interface.
type benchReport struct {
	Workload string  `json:"workload"`
	Loop     string  `json:"loop"` // "closed" or "open"
	Callers  int     `json:"callers"`
	Asked    float64 `json:"asked_per_second,omitempty"`
	Seconds  float64 `json:"seconds"`
	Requests int64   `json:"requests"`
	Rate     float64 `json:"requests_per_second"`
	Keys     int64   `json:"keys"` // read or written
	KeyRate  float64 `json:"keys_per_second"`
	Latency  struct {
		P50  float64 `json:"p50"`
		P90  float64 `json:"p90"`
		P99  float64 `json:"p99"`
		P999 float64 `json:"p99_9"`
		Max  float64 `json:"max"`
	} `json:"latency_us"`
}

func (a *app) printBench(r *benchReport) error {
	format := a.formatOr(formatTable)
	if printsJSON(format) {
		return a.printJSON(format, r)
	}
	micro := func(us float64) string { return time.Duration(us * 1e3).Round(time.Microsecond).String() }
	loop := fmt.Sprintf("%s, %d callers", r.Loop, r.Callers)
	if r.Asked > 0 {
		loop += fmt.Sprintf(", %.0f/s asked", r.Asked)
	}
	rows := [][]string{
		{"workload", r.Workload},
		{"loop", loop},
		{"requests", fmt.Sprintf("%d in %.2f s: %.0f/s", r.Requests, r.Seconds, r.Rate)},
		{"keys", fmt.Sprintf("%d: %.0f/s", r.Keys, r.KeyRate)},
		{"latency", fmt.Sprintf("p50 %s, p90 %s, p99 %s, p99.9 %s, max %s", micro(r.Latency.P50), micro(r.Latency.P90), micro(r.Latency.P99),
			micro(r.Latency.P999), micro(r.Latency.Max))},
	}
	if r.Keys == r.Requests {
		rows = slices.Delete(rows, 3, 4)
	}
	return writeRows(a.out, rows, make([]int, 2))
}

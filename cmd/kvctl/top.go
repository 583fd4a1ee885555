package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

// topIntervalMin keeps a typing error from loading the server.
const topIntervalMin = 100 * time.Millisecond

func (a *app) topCommand() *cobra.Command {
	interval, count := time.Second, uint64(0)
	cmd := &cobra.Command{
		Use:   "top",
		Short: "Show what the server does, live",
		Long: `Show what the server does: requests a second by method with their latencies, commits, syncs, memory, cache, connections, transactions, watches
and active conditions. On a terminal the screen is refreshed until Ctrl-C, and shows it while the server cannot be reached; in a pipe each
refresh is one line.

Rates are those of the last interval. P50 and P99 are upper bounds: latencies are counted in steps of powers of two. A request that a
pipeline or a transaction carries counts under its own method when it is answered, a stream when it ends.`,
		Example: `  kvctl top
  kvctl top --interval 10s --count 6 | tee load.txt
  kvctl top -o jsonl | jq .requests_per_second`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if interval < topIntervalMin {
				return usageError{fmt.Errorf("--interval %v: must be at least %v", interval, topIntervalMin)}
			}
			return a.withClient(func(c *client.Client) error { return a.top(cmd.Context(), c, interval, count) })
		},
	}
	cmd.Flags().DurationVar(&interval, "interval", interval, "refresh after `DURATION`")
	cmd.Flags().Uint64Var(&count, "count", 0, "end after `N` refreshes; 0 is never")
	return cmd
}

// top prints a refresh after each interval. A server that cannot be reached ends it, but on a terminal only at first.
func (a *app) top(ctx context.Context, c *client.Client, interval time.Duration, count uint64) error {
	before, err := readTop(ctx, c)
	if err != nil {
		return err
	}
	format := a.formatOr(formatTable)
	live := a.outTerminal && format == formatTable
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for n := uint64(0); count == 0 || n < count; n++ {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
		after, err := readTop(ctx, c)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && !live:
			return err
		case err != nil:
			err = a.showLive([]string{"kvctl top " + a.endpoint, "", "the server cannot be reached: " + err.Error()})
		case live:
			err = a.showLive(newActivity(before, after).lines(a.endpoint))
		case printsJSON(format):
			err = a.printJSON(formatJSONL, newActivity(before, after))
		default:
			err = a.print("%s\n", newActivity(before, after).line())
		}
		if err != nil {
			return err
		}
		before = cmp.Or(after, before)
	}
	return nil
}

// topReading is the state of the server at a time.
type topReading struct {
	at     time.Time
	status *kvpb.StatusResponse
}

func readTop(ctx context.Context, c *client.Client) (*topReading, error) {
	status, err := c.Status(ctx)
	if err != nil {
		return nil, err
	}
	if status.GetActivity() == nil {
		return nil, errors.New("the server is of a version that does not report its activity; its metrics have it")
	}
	return &topReading{time.Now(), status}, nil
}

// showLive replaces the screen by lines, as much of them as it has room for.
func (a *app) showLive(lines []string) error {
	columns, rows := a.screenSize()
	if rows > 1 && len(lines) >= rows { // the cursor takes the last row
		lines = lines[:rows-1]
	}
	var out strings.Builder
	out.WriteString("\x1b[H") // to the first row
	for _, line := range lines {
		line = cut(oneLine(line), columns)
		out.WriteString(a.painted(line) + "\x1b[K\n") // and erase the rest of the row
	}
	out.WriteString("\x1b[J") // and the rows below
	return a.print("%s", out.String())
}

// activity is what a server did between two readings, and its state at the second.
type activity struct {
	Time         string           `json:"time"`
	State        string           `json:"state"`
	Requests     float64          `json:"requests_per_second"`
	Failed       float64          `json:"failed_per_second"`
	Methods      []methodActivity `json:"methods"`
	Commits      float64          `json:"commits_per_second"`
	Syncs        float64          `json:"syncs_per_second"`
	LogBytes     float64          `json:"log_bytes_per_second"`
	HitRatio     *float64         `json:"cache_hit_ratio"` // null if no page was needed
	MemoryUsed   uint64           `json:"memory_used_bytes"`
	MemoryBudget uint64           `json:"memory_budget_bytes"`
	DiskFree     uint64           `json:"disk_free_bytes"`
	Connections  uint64           `json:"connections"`
	InFlight     uint64           `json:"requests_in_flight"`
	Transactions uint64           `json:"transactions"`
	Watches      uint64           `json:"watches"`
	Snapshots    uint64           `json:"snapshots"`
	Conditions   []string         `json:"conditions"`

	up     time.Duration
	health *kvpb.Health
}

// methodActivity has the requests of one method. Latencies are in microseconds.
type methodActivity struct {
	Method string  `json:"method"`
	Rate   float64 `json:"requests_per_second"`
	Failed float64 `json:"failed_per_second"`
	P50    float64 `json:"p50_us"`
	P99    float64 `json:"p99_us"`
}

// newActivity compares two readings. After a restart of the server between them, the counters before are zero.
func newActivity(a, b *topReading) *activity {
	before, after := a.status.GetActivity(), b.status.GetActivity()
	seconds := b.at.Sub(a.at).Seconds()
	if !a.status.GetStartTime().AsTime().Equal(b.status.GetStartTime().AsTime()) {
		before, seconds = &kvpb.Activity{}, b.status.GetUptime().AsDuration().Seconds()
	}
	rate := func(before, after uint64) float64 { return perSecond(before, after, seconds) }
	s, sizes, sessions := b.status, b.status.GetSizes(), b.status.GetSessions()
	out := &activity{
		Time: b.at.Format(time.RFC3339), State: strings.ToLower(strings.TrimPrefix(s.GetHealth().GetState().String(), "STATE_")),
		Methods: []methodActivity{}, Conditions: []string{},
		Commits: rate(before.GetCommits(), after.GetCommits()), Syncs: rate(before.GetSyncs(), after.GetSyncs()),
		LogBytes:   rate(before.GetLogBytes(), after.GetLogBytes()),
		MemoryUsed: sizes.GetMemoryUsedBytes(), MemoryBudget: sizes.GetMemoryBudgetBytes(), DiskFree: sizes.GetDiskFreeBytes(),
		Connections: sessions.GetOpen(), InFlight: sessions.GetRequestsInFlight(), Snapshots: sessions.GetSnapshots(),
		Transactions: after.GetTransactions(), Watches: after.GetWatches(),
		up: s.GetUptime().AsDuration(), health: s.GetHealth(),
	}
	hits, misses := after.GetCacheHits()-before.GetCacheHits(), after.GetCacheMisses()-before.GetCacheMisses()
	if hits+misses > 0 {
		ratio := float64(hits) / float64(hits+misses)
		out.HitRatio = &ratio
	}
	for _, c := range s.GetHealth().GetConditions() {
		out.Conditions = append(out.Conditions, c.GetName())
	}
	out.addMethods(before.GetMethods(), after.GetMethods(), seconds)
	return out
}

func perSecond(before, after uint64, seconds float64) float64 {
	if seconds <= 0 || after < before {
		return 0
	}
	return float64(after-before) / seconds
}

// addMethods adds the methods that had requests, the busiest first.
func (v *activity) addMethods(before, after []*kvpb.MethodTotals, seconds float64) {
	last := map[string]*kvpb.MethodTotals{}
	for _, m := range before {
		last[m.GetMethod()] = m
	}
	for _, m := range after {
		old := last[m.GetMethod()]
		one := methodActivity{
			Method: m.GetMethod(), Rate: perSecond(old.GetCount(), m.GetCount(), seconds), Failed: perSecond(old.GetFailed(), m.GetFailed(), seconds),
		}
		if one.Rate == 0 {
			continue
		}
		one.P50, one.P99 = latencyBound(old, m, 0.5), latencyBound(old, m, 0.99)
		v.Requests, v.Failed = v.Requests+one.Rate, v.Failed+one.Failed
		v.Methods = append(v.Methods, one)
	}
	slices.SortStableFunc(v.Methods, func(x, y methodActivity) int { return cmp.Compare(y.Rate, x.Rate) })
}

// latencyBound is an upper bound, in microseconds, of the share q of the requests between two readings.
func latencyBound(before, after *kvpb.MethodTotals, q float64) float64 {
	counts, total := slices.Clone(after.GetLatency()), uint64(0)
	for i := range counts {
		if i < len(before.GetLatency()) {
			counts[i] -= before.GetLatency()[i]
		}
		total += counts[i]
	}
	const first = 4.096 // of the buckets; each has twice the bound of the one before
	bound, below := first, uint64(0)
	for _, n := range counts {
		if below += n; float64(below) >= q*float64(total) {
			break
		}
		bound *= 2
	}
	return bound
}

// latencyText rounds microseconds to three digits.
func latencyText(us float64) string {
	unit := "us"
	if us >= 1000 {
		us, unit = us/1000, "ms"
	}
	if us >= 1000 {
		us, unit = us/1000, "s"
	}
	return fmt.Sprintf("%.3g %s", us, unit)
}

func (v *activity) hitText() string {
	if v.HitRatio == nil {
		return "-"
	}
	return fmt.Sprintf("%.1f%%", 100**v.HitRatio)
}

// line is the activity on one line, for pipes.
func (v *activity) line() string {
	parts := []string{v.Time, v.State, fmt.Sprintf("%.0f requests/s (%.0f failed)", v.Requests, v.Failed)}
	for _, m := range v.Methods {
		parts = append(parts, fmt.Sprintf("%s %.0f/s p50 %s p99 %s", m.Method, m.Rate, latencyText(m.P50), latencyText(m.P99)))
	}
	parts = append(parts,
		fmt.Sprintf("%.0f commits/s", v.Commits), fmt.Sprintf("%.0f syncs/s", v.Syncs),
		fmt.Sprintf("memory %s of %s", size(v.MemoryUsed), size(v.MemoryBudget)), "cache hits "+v.hitText(),
		fmt.Sprintf("%d connections", v.Connections), fmt.Sprintf("%d transactions", v.Transactions), fmt.Sprintf("%d watches", v.Watches),
		"conditions: "+cmp.Or(strings.Join(v.Conditions, " "), "none"))
	return strings.Join(parts, ", ")
}

// lines are the activity for a screen, the most important first, as a low screen shows only those.
func (v *activity) lines(endpoint string) []string {
	lines := []string{
		fmt.Sprintf("%s, up %v, %s", healthText(v.health), v.up.Round(time.Second), endpoint),
	}
	for _, c := range v.health.GetConditions() {
		lines = append(lines, conditionText(c))
	}
	lines = append(lines, "",
		fmt.Sprintf("requests  %.0f/s, %.0f/s failed, %d in flight", v.Requests, v.Failed, v.InFlight),
		fmt.Sprintf("commits   %.0f/s, %.0f syncs/s, log %s/s", v.Commits, v.Syncs, size(uint64(v.LogBytes))),
		fmt.Sprintf("memory    %s of %s, cache hits %s", size(v.MemoryUsed), size(v.MemoryBudget), v.hitText()),
		fmt.Sprintf("sessions  %d connections, %d transactions, %d watches, %d snapshots", v.Connections, v.Transactions, v.Watches, v.Snapshots),
		fmt.Sprintf("disk      %s free", size(v.DiskFree)),
		"", fmt.Sprintf("%-15s %8s %8s %7s %7s", "METHOD", "RATE/S", "FAILED/S", "P50", "P99"))
	for _, m := range v.Methods {
		lines = append(lines, fmt.Sprintf("%-15s %8.1f %8.1f %7s %7s", m.Method, m.Rate, m.Failed, latencyText(m.P50), latencyText(m.P99)))
	}
	return lines
}

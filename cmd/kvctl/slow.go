package main

import (
	"cmp"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	kvpb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/client"
)

func (a *app) slowCommand() *cobra.Command {
	var limit uint32
	var remove bool
	cmd := &cobra.Command{
		Use:   "slow",
		Short: "Show the slowest requests of the last hour",
		Long: `Show the slowest requests of the last hour that took longer than --slow-request-threshold of the server, slowest first, and where their time went:
queue, waiting to be executed; latch, for other commits; memory, for room in a memtable or delayed by the throttle; pages, for pages of the data file;
sync, for stable storage; client, for the client to take the answer; rest, executing. The table shows the largest two; -o json shows all.
A second table has the traces of requests that are part of one: that of the client's traceparent, or of the server's own (--trace-endpoint).`,
		Example: `  kvctl slow --limit 10
  kvctl slow -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				out, err := c.SlowRequests(cmd.Context(), limit, remove)
				if err != nil {
					return err
				}
				return a.printSlow(out)
			})
		},
	}
	cmd.Flags().Uint32Var(&limit, "limit", 20, "show at most `N` requests; 0 is all")
	cmd.Flags().BoolVar(&remove, "clear", false, "let the server keep none of them afterwards")
	return cmd
}

// slowRow is a request as JSON shows it. Durations are in microseconds.
type slowRow struct {
	Ended     string           `json:"ended"`
	Method    string           `json:"method"`
	Code      string           `json:"code"`
	Took      int64            `json:"took_us"`
	Waits     map[string]int64 `json:"waits_us"`
	PagesRead uint64           `json:"pages_read"`
	Bytes     uint64           `json:"request_bytes"`
	Peer      string           `json:"peer"`
	RequestID string           `json:"request_id,omitempty"`
	TraceID   string           `json:"trace_id,omitempty"`
	KeyPrefix string           `json:"key_prefix,omitempty"`
	KeyBinary []byte           `json:"key_prefix_base64,omitempty"` // of a key that is not UTF-8
}

func (a *app) printSlow(out *kvpb.SlowRequestsResponse) error {
	rows := make([]slowRow, len(out.GetRequests()))
	for i, r := range out.GetRequests() {
		rows[i] = slowRow{
			Ended: r.GetEnded().AsTime().Format(time.RFC3339Nano), Method: r.GetMethod(), Code: r.GetCode(), Took: r.GetTook().AsDuration().Microseconds(),
			Waits: map[string]int64{}, PagesRead: r.GetPagesRead(), Bytes: r.GetRequestBytes(), Peer: r.GetPeer(),
			RequestID: hex.EncodeToString(r.GetRequestId()), TraceID: r.GetTraceId(),
		}
		if k := r.GetKeyPrefix(); utf8.Valid(k) {
			rows[i].KeyPrefix = string(k)
		} else {
			rows[i].KeyBinary = k
		}
		for _, w := range waitsOf(r) {
			rows[i].Waits[w.name] = w.took.Microseconds()
		}
	}
	if printed, err := printReport(a, rows); printed {
		return err
	}
	if len(rows) == 0 {
		return a.print("no request took longer than %v in the last hour (%d since the start)\n", out.GetThreshold().AsDuration(), out.GetTotal())
	}
	table := [][]string{{"ENDED", "TOOK", "METHOD", "CODE", "WHERE", "PEER"}}
	for _, r := range out.GetRequests() {
		table = append(table, []string{
			r.GetEnded().AsTime().Local().Format(time.TimeOnly), shownDuration(r.GetTook()), r.GetMethod(), r.GetCode(), slowestWaits(r), r.GetPeer(),
		})
	}
	if err := a.writeTable(table); err != nil {
		return err
	}
	return a.printTraces(out.GetRequests())
}

// printTraces prints the traces of requests that have one, in a table of its own: cut to fit, a trace could not be looked up.
func (a *app) printTraces(requests []*kvpb.SlowRequest) error {
	table := [][]string{{"ENDED", "METHOD", "TRACE"}}
	for _, r := range requests {
		if r.GetTraceId() != "" {
			table = append(table, []string{r.GetEnded().AsTime().Local().Format(time.TimeOnly), r.GetMethod(), r.GetTraceId()})
		}
	}
	if len(table) == 1 {
		return nil
	}
	if err := a.print("\n"); err != nil {
		return err
	}
	return a.writeTable(table)
}

// slowWait is a part of the time of a request.
type slowWait struct {
	name string
	took time.Duration
}

// waitsOf are the parts of the time of a request, longest first. What it did not wait is the rest.
func waitsOf(r *kvpb.SlowRequest) (all []slowWait) {
	rest := r.GetTook().AsDuration()
	for _, w := range []struct {
		name string
		took *durationpb.Duration
	}{
		{"queue", r.GetQueue()}, {"latch", r.GetLatch()}, {"memory", r.GetMemory()}, {"pages", r.GetPages()}, {"sync", r.GetSync()}, {"client", r.GetClient()},
	} {
		if d := w.took.AsDuration(); d > 0 {
			all = append(all, slowWait{w.name, d})
			rest -= d
		}
	}
	all = append(all, slowWait{"rest", max(0, rest)})
	slices.SortStableFunc(all, func(x, y slowWait) int { return cmp.Compare(y.took, x.took) })
	return all
}

// slowestWaits names the largest two parts.
func slowestWaits(r *kvpb.SlowRequest) string {
	all := waitsOf(r)
	parts := make([]string, 0, 2)
	for _, w := range all[:min(2, len(all))] {
		text := w.name + " " + shownDuration(durationpb.New(w.took))
		if w.name == "pages" {
			text += fmt.Sprintf(" (%d)", r.GetPagesRead())
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}

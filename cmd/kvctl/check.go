package main

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/spf13/cobra"

	"github.com/epochkv/epochkv/client"
)

// errCheckFailed ends a check that has already said what is wrong.
var errCheckFailed = errors.New("at least one check failed")

// verdict is the outcome of one check.
type verdict string

const (
	verdictPass verdict = "PASS"
	verdictWarn verdict = "WARN"
	verdictFail verdict = "FAIL"
)

// finding is what one check measured and what it means.
type finding struct {
	Check    string  `json:"check"`
	Verdict  verdict `json:"verdict"`
	Measured string  `json:"measured"`
	Meaning  string  `json:"meaning"`
}

// bars divide a measured number into verdicts. With low set, small numbers are bad.
type bars struct {
	warn, fail float64
	low        bool
}

func (b bars) judge(x float64) verdict {
	if b.low {
		x, b.warn, b.fail = -x, -b.warn, -b.fail
	}
	switch {
	case x >= b.fail:
		return verdictFail
	case x >= b.warn:
		return verdictWarn
	}
	return verdictPass
}

// advice holds an explanation for each verdict.
type advice struct{ pass, warn, fail string }

func (v advice) of(w verdict) string {
	return map[verdict]string{verdictPass: v.pass, verdictWarn: v.warn, verdictFail: v.fail}[w]
}

func (a *app) checkCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Check a disk or the way to a server for what EpochKV needs",
		Long: `Measure a disk, or the latency to a server, and say PASS, WARN or FAIL with an explanation each.

The exit code is 1 if anything failed. Warnings do not change it.`,
		Example: `  kvctl check disk /var/lib/epochkv
  kvctl check latency --endpoint db1:7400`,
	}
	cmd.AddCommand(a.checkDiskCommand(), a.checkLatencyCommand())
	return cmd
}

func (a *app) checkDiskCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "disk DIR",
		Short: "Measure syncs, sequential and random reads in a directory",
		Long: fmt.Sprintf(`Measure how fast a small write reaches stable storage (fdatasync), and how fast one large and many random reads are, in a
directory on the disk in question. It takes a few seconds, needs %s of space, and removes its file.`, size(diskBytes)),
		Example: `  kvctl check disk ./data
  kvctl check disk /var/lib/epochkv -o json`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			findings, err := checkDisk(cmd.Context(), args[0], diskBytes, diskFor)
			if err != nil {
				return err
			}
			return a.printFindings(findings)
		},
	}
}

func (a *app) checkLatencyCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "latency",
		Short: "Measure the round trip to a server and its durable puts",
		Long: `Measure how long an empty request takes to the server and back, and how long a durable put takes, one at a time. The
keys that it writes begin with "` + latencyPrefix + `" and are deleted.`,
		Example: `  kvctl check latency
  kvctl check latency --endpoint db1:7400 -o json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withClient(func(c *client.Client) error {
				findings, err := checkLatency(cmd.Context(), c, latencyFor)
				if err != nil {
					return err
				}
				return a.printFindings(findings)
			})
		},
	}
}

// printFindings prints all findings and fails if one of them did.
func (a *app) printFindings(findings []finding) error {
	var err error
	switch format := a.formatOr(formatTable); format {
	case formatJSON:
		err = a.printJSON(format, findings)
	case formatJSONL:
		for _, f := range findings {
			err = errors.Join(err, a.printJSON(format, f))
		}
	default:
		rows := [][]string{}
		for _, f := range findings {
			rows = append(rows, []string{string(f.Verdict), f.Check, f.Measured, f.Meaning})
		}
		err = writeRows(a.out, rows, make([]int, 4))
	}
	if err == nil && slices.ContainsFunc(findings, func(f finding) bool { return f.Verdict == verdictFail }) {
		err = errCheckFailed
	}
	return err
}

// timed calls do again and again for so long, at least once, and collects how long each call took, in nanoseconds.
func timed(d time.Duration, do func() error) (*hdrhistogram.Histogram, error) {
	h := hdrhistogram.New(1, int64(latencyMax), 3)
	for end := time.Now().Add(d); ; {
		began := time.Now()
		if err := do(); err != nil {
			return nil, err
		}
		now := time.Now()
		// The error is for values out of range, which the clamp excludes.
		_ = h.RecordValue(int64(min(max(now.Sub(began), 1), latencyMax)))
		if now.After(end) {
			return h, nil
		}
	}
}

// judgeLatency makes a finding of a histogram's 99th percentile; the bars are milliseconds.
func judgeLatency(check string, h *hdrhistogram.Histogram, b bars, say advice) finding {
	at := func(q float64) time.Duration { return time.Duration(h.ValueAtQuantile(q)) }
	v := b.judge(float64(at(99)) / float64(time.Millisecond))
	return finding{
		Check: check, Verdict: v, Meaning: say.of(v),
		Measured: fmt.Sprintf("p50 %s, p99 %s, max %s of %d", at(50).Round(time.Microsecond), at(99).Round(time.Microsecond),
			time.Duration(h.Max()).Round(time.Microsecond), h.TotalCount()),
	}
}

package harness

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Record is the part of some runs that the repository keeps: one table of figures and the samples for benchstat. Each scenario is there
// once, from the newest run that measured it. The runs themselves, with charts and counters, are too large to be kept.
type Record struct{ runs []*Report }

// errNoRun is returned for a record of nothing.
var errNoRun = errors.New("no run to record: smoke runs and failed scenarios measure nothing")

// NewRecord makes a record of runs, given in any order. It takes their scenarios over.
func NewRecord(runs ...*Report) (*Record, error) {
	newest := slices.SortedFunc(slices.Values(runs), func(a, b *Report) int { return b.Began.Compare(a.Began) })
	r, measured := &Record{}, map[string]bool{}
	for _, run := range newest {
		run.Outcomes = slices.DeleteFunc(run.Outcomes, func(o Outcome) bool {
			drop := run.Smoke || o.Failed != "" || measured[o.Name]
			measured[o.Name] = measured[o.Name] || !drop
			return drop
		})
		if len(run.Outcomes) > 0 {
			r.runs = append(r.runs, run)
		}
	}
	if len(r.runs) == 0 {
		return nil, errNoRun
	}
	return r, nil
}

// WriteMarkdown writes machine and command of each run, and all figures as one table.
func (r *Record) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	b.WriteString("# Results\n\nThis page and [benchstat.txt](benchstat.txt) are generated: `make bench` and `make bench-peers` write whole runs, with charts, to" +
		" `runs` beside this page, which git ignores, and `make bench-record` makes both files from them. Each scenario is here once, from the newest run that measured it.\n")
	b.WriteString("\n| run | machine | commit | command |\n|---|---|---|---|\n")
	for i, run := range r.runs {
		fmt.Fprintf(&b, "| %d, %s | %s | %s | `%s` |\n", i+1, run.Began.UTC().Format("2006-01-02 15:04 UTC"), run.Machine, run.commit(), cell(run.Command))
	}
	b.WriteString("\nFigures: " + r.tally() + ". Brackets hold the 95 % interval of a ratio or rate.\n")
	b.WriteString("\n| run | scenario | at | what | bar | reached | of the bar | | source |\n|---|---|---|---|---|---|---|---|---|\n")
	for i, run := range r.runs {
		for _, o := range run.Outcomes {
			o.markdownVerdicts(&b, fmt.Sprintf("| %d ", i+1))
		}
	}
	r.writeGrowth(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

// writeGrowth writes what an operation costs along the axes of growth.
func (r *Record) writeGrowth(b *strings.Builder) {
	var rows strings.Builder
	for i, run := range r.runs {
		for _, o := range run.Outcomes {
			for _, s := range o.Series {
				if s.Growth == nil {
					continue
				}
				var costs []string
				for _, p := range s.Points {
					costs = append(costs, fmt.Sprintf("%d: %.4g", p.At, 1e9/p.Rate.Median))
				}
				fmt.Fprintf(&rows, "| %d | %s | %s | %s | %s | %.2f (%.2f) |\n", i+1, o.Name, cell(s.Arm), cell(o.Axis), strings.Join(costs, ", "), s.Growth.Slope, s.Growth.R2)
			}
		}
	}
	if rows.Len() > 0 {
		b.WriteString("\n## Growth\n\nMedian cost of an operation in nanoseconds at points of an axis, and the power of the axis with which it grows (with R² of the fit).\n" +
			"\n| run | scenario | arm | axis | cost | power |\n|---|---|---|---|---|---|\n" + rows.String())
	}
}

// cell is text that does not end a table's cell.
func cell(text string) string { return strings.ReplaceAll(text, "|", `\|`) }

// tally counts the verdicts of all runs.
func (r *Record) tally() string {
	counts := map[string]int{}
	for _, run := range r.runs {
		for _, t := range run.tally() {
			counts[t.Verdict] += t.Count
		}
	}
	var parts []string
	for _, verdict := range verdicts {
		if n := counts[verdict]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, verdict))
		}
	}
	return cmp.Or(strings.Join(parts, "; "), "none")
}

// WriteBenchstat writes the samples of all runs. The lines for machine and commit come before the samples of each run.
func (r *Record) WriteBenchstat(w io.Writer) error {
	for _, run := range r.runs {
		if err := run.WriteBenchstat(w); err != nil {
			return err
		}
	}
	return nil
}

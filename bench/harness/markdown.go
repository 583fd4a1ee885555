package harness

import (
	"fmt"
	"io"
	"strconv"
	"strings"
)

// WriteMarkdown writes the report as tables: the figures first, then every scenario.
func (r *Report) WriteMarkdown(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Benchmark of %s\n\n%s, commit %s, seed %d.", r.Began.UTC().Format("2006-01-02 15:04 UTC"), r.Machine, r.commit(), r.Seed)
	for _, name := range sortedKeys(r.Machine.Versions) {
		fmt.Fprintf(&b, " %s %s.", name, r.Machine.Versions[name])
	}
	fmt.Fprintf(&b, "\nCommand: `%s`.\n", r.Command)
	if r.Smoke {
		b.WriteString("\n**A smoke run: it shows that the scenarios run and verify. Its numbers mean nothing.**\n")
	}
	b.WriteString("\nRates are medians; ± is the coefficient of variation; brackets hold the 95 % interval of a ratio or rate.\n")
	r.markdownFigures(&b)
	for _, o := range r.Outcomes {
		o.markdown(&b)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// commit is the commit that was measured.
func (r *Report) commit() string {
	if r.Machine.Dirty {
		return r.Machine.Commit + " with changes"
	}
	return r.Machine.Commit
}

func (o *Outcome) markdown(b *strings.Builder) {
	if o.Failed != "" {
		fmt.Fprintf(b, "\n## %s\n\n%s **Failed**: %s.\n", o.Name, o.About, o.Failed)
		return
	}
	fmt.Fprintf(b, "\n## %s\n\n%s %s.\n", o.Name, o.About, o.Extent())
	if o.Origin != "" {
		fmt.Fprintf(b, "Origin: %s\n", o.Origin)
	}
	b.WriteString("\n")
	fmt.Fprintf(b, "| %s | arm | %s/s | ± | CPU ns/op | allocs/op | B/op | RSS MiB | disk MiB | p50 / p99 / p99.9 us | proof |\n", o.Axis, o.Unit)
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, at := range o.points() {
		for i := range o.Series {
			p := o.Series[i].at(at)
			if p == nil {
				continue
			}
			fmt.Fprintf(b, "| %s | %s | %s | %.1f %% | %.0f | %s | %.0f | %.0f | %s | %s |\n", o.At(at), o.Series[i].Arm, rate(p.Rate.Median),
				p.Rate.CV*100, p.middle(func(s Sample) float64 { return s.CPUPerOp }), p.allocations(),
				p.middle(func(s Sample) float64 { return s.ResidentMiB }),
				p.middle(func(s Sample) float64 { return s.DiskMiB }), p.latency(), p.proof())
		}
	}
	for _, arm := range sortedKeys(o.Absent) {
		fmt.Fprintf(b, "\n%s did not run: %s.\n", arm, o.Absent[arm])
	}
	o.markdownGrowth(b)
}

// Extent says how much a run is.
func (o Outcome) Extent() string {
	switch {
	case o.Seconds > 0 && max(o.Load, o.Size) > 1:
		return fmt.Sprintf("%s records, %.2g s a run", thousands(max(o.Load, o.Size)), o.Seconds)
	case o.Seconds > 0:
		return fmt.Sprintf("%.2g s a run", o.Seconds)
	case o.Size < o.Full:
		return fmt.Sprintf("%s %s a run, %s with more time", thousands(o.Size), o.Unit, thousands(o.Full))
	}
	return fmt.Sprintf("%s %s a run", thousands(o.Size), o.Unit)
}

// thousands sets off groups of three digits.
func thousands(n int) string {
	digits := strconv.Itoa(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

// allocations are the two columns of them, which a server in a process of its own does not tell.
func (p *Point) allocations() string {
	if len(p.Samples) > 0 && p.Samples[0].Apart {
		return "- | -"
	}
	return fmt.Sprintf("%.2f | %.0f", p.middle(func(s Sample) float64 { return s.AllocsPerOp }), p.middle(func(s Sample) float64 { return s.BytesPerOp }))
}

// markdownGrowth says how the cost per operation grows.
func (o *Outcome) markdownGrowth(b *strings.Builder) {
	for _, s := range o.Series {
		if s.Growth != nil {
			fmt.Fprintf(b, "\nThe cost of %s grows with %s to the power of %.2f (R² %.2f).\n", s.Arm, o.Axis, s.Growth.Slope, s.Growth.R2)
		}
	}
}

// points lists the points of the axis at which anything was measured, in the order of the first round.
func (o *Outcome) points() (points []int) {
	seen := map[int]bool{}
	for _, s := range o.Series {
		for _, p := range s.Points {
			if !seen[p.At] {
				seen[p.At] = true
				points = append(points, p.At)
			}
		}
	}
	return points
}

// middle is the median over samples of one of their numbers.
func (p *Point) middle(number func(Sample) float64) float64 {
	values := make([]float64, len(p.Samples))
	for i, s := range p.Samples {
		values[i] = number(s)
	}
	return median(values)
}

func (p *Point) latency() string {
	if len(p.Samples) == 0 || p.Samples[0].Latency == nil {
		return ""
	}
	return fmt.Sprintf("%.0f / %.0f / %.0f", p.middle(func(s Sample) float64 { return s.Latency.P50 }),
		p.middle(func(s Sample) float64 { return s.Latency.P99 }), p.middle(func(s Sample) float64 { return s.Latency.P999 }))
}

// proof lists the counters of the last sample.
func (p *Point) proof() string {
	if len(p.Samples) == 0 {
		return ""
	}
	counters := p.Samples[len(p.Samples)-1].Counters
	var parts []string
	for _, name := range sortedKeys(counters) {
		parts = append(parts, fmt.Sprintf("%s %s", name, rate(counters[name])))
	}
	return strings.Join(parts, ", ")
}

// rate renders a number with three significant digits and its magnitude.
func rate(x float64) string {
	switch {
	case x >= 1e6:
		return fmt.Sprintf("%.3g M", x/1e6)
	case x >= 1e4:
		return fmt.Sprintf("%.0f k", x/1e3)
	case x >= 100 || x == float64(int64(x)):
		return fmt.Sprintf("%.0f", x)
	}
	return fmt.Sprintf("%.3g", x)
}

package harness

import (
	"fmt"
	"strings"
)

// How a figure can come out. Within noise means that the other outcome lies inside the interval.
const (
	verdictMet         = "met"
	verdictMetNoise    = "met, within noise"
	verdictMissedNoise = "missed, within noise"
	verdictMissed      = "missed"
	verdictNotJudged   = "not judged"
)

var verdicts = []string{verdictMet, verdictMetNoise, verdictMissedNoise, verdictMissed, verdictNotJudged}

// classes are the styles of verdicts on the page.
var classes = map[string]string{
	verdictMet: "met", verdictMetNoise: "met noise", verdictMissed: "missed", verdictMissedNoise: "missed noise", verdictNotJudged: "soft",
}

// Verdict says how the figure came out.
func (v Verdict) Verdict() string {
	low, high := v.reaches(v.Reached.Low), v.reaches(v.Reached.High)
	switch {
	case !v.Judged:
		return verdictNotJudged
	case v.Met && !(low && high):
		return verdictMetNoise
	case v.Met:
		return verdictMet
	case low || high:
		return verdictMissedNoise
	}
	return verdictMissed
}

// Class is the style in which the verdict is written.
func (v Verdict) Class() string { return classes[v.Verdict()] }

// ofBarMax is where it does not matter any more how much better than the bar it is.
const ofBarMax = 100

// OfBar is how far the bar was reached: 1 is just so and more is better, for a ceiling too.
func (v Verdict) OfBar() float64 {
	reached, bar := v.Reached.Median, v.AtLeast
	if v.AtMost != 0 {
		reached, bar = v.AtMost, v.Reached.Median
	}
	if bar <= 0 || reached/bar > ofBarMax {
		return ofBarMax
	}
	return reached / bar
}

// What names what the figure is about, without where.
func (v Verdict) What() string {
	what := v.Arm
	if v.Against != "" {
		what += " over " + v.Against
	}
	if v.AgainstAt != 0 {
		what += fmt.Sprintf(" at %d", v.AgainstAt)
	}
	if v.Measure != "" {
		what += ", " + v.Measure
	}
	return what
}

// Bar is what the figure asks.
func (v Verdict) Bar() string {
	if v.AtMost != 0 {
		return "≤ " + v.quantity(v.AtMost)
	}
	return "≥ " + v.quantity(v.AtLeast)
}

// Got is what was reached, with its interval.
func (v Verdict) Got() string {
	return v.Short() + " " + v.Interval()
}

// Short is what was reached.
func (v Verdict) Short() string { return v.quantity(v.Reached.Median) }

// Interval is where it lies with 95 % probability.
func (v Verdict) Interval() string {
	return fmt.Sprintf("[%s, %s]", v.quantity(v.Reached.Low), v.quantity(v.Reached.High))
}

func (v Verdict) quantity(x float64) string {
	switch {
	case v.Against != "":
		return fmt.Sprintf("%.2f", x)
	case v.Measure != "":
		return rate(x)
	}
	return rate(x) + "/s"
}

// Demand is what was asked of an arm, at all of its points.
type Demand struct {
	What, Source string
	Bar          string // empty: each point has its own
	Points       []Verdict
}

// Demands groups the verdicts by what was asked for.
func (o *Outcome) Demands() (out []Demand) {
	for _, v := range o.Figures {
		last := len(out) - 1
		if last < 0 || out[last].What != v.What() || out[last].Source != v.Source {
			out = append(out, Demand{What: v.What(), Source: v.Source, Bar: v.Bar()})
			last++
		}
		if out[last].Bar != v.Bar() {
			out[last].Bar = ""
		}
		out[last].Points = append(out[last].Points, v)
	}
	return out
}

// tallied is how many verdicts are the same.
type tallied struct {
	Verdict, Class string
	Count          int
}

// tally counts the verdicts, one for each figure and point.
func (r *Report) tally() (out []tallied) {
	counts := map[string]int{}
	for _, o := range r.Outcomes {
		for _, v := range o.Figures {
			counts[v.Verdict()]++
		}
	}
	for _, verdict := range verdicts {
		if n := counts[verdict]; n > 0 {
			out = append(out, tallied{Verdict: verdict, Class: classes[verdict], Count: n})
		}
	}
	return out
}

func (r *Report) markdownFigures(b *strings.Builder) {
	b.WriteString("\n## Figures\n\n")
	for _, t := range r.tally() {
		fmt.Fprintf(b, "- %s: %d\n", t.Verdict, t.Count)
	}
	b.WriteString("\n| scenario | at | what | bar | reached | of the bar | | source |\n|---|---|---|---|---|---|---|---|\n")
	for _, o := range r.Outcomes {
		o.markdownVerdicts(b, "")
	}
}

// markdownVerdicts writes a row for each figure and point; first is the cell before them.
func (o *Outcome) markdownVerdicts(b *strings.Builder, first string) {
	for _, v := range o.Figures {
		verdict := v.Verdict()
		if rest, missed := strings.CutPrefix(verdict, verdictMissed); missed {
			verdict = "**" + verdictMissed + "**" + rest
		}
		fmt.Fprintf(b, "%s| %s | %s %s | %s | %s | %s | %.0f %% | %s | %s |\n", first, o.Name, o.Axis, o.At(v.At), v.What(), v.Bar(), v.Got(),
			100*v.OfBar(), verdict, v.Source)
	}
}

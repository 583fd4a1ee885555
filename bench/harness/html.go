package harness

import (
	_ "embed" // the chart library and the page
	"html/template"
	"io"
	"maps"
	"slices"
)

// The chart library is uPlot 1.6.32 (MIT, assets/uplot/LICENSE), embedded so that the page is readable without network.
var (
	//go:embed assets/uplot/uPlot.iife.min.js
	chartScript string
	//go:embed assets/uplot/uPlot.min.css
	chartStyle string
	//go:embed assets/uplot/LICENSE
	chartLicence string
	//go:embed assets/report.html
	pageText string
	//go:embed assets/report.css
	pageStyle string
	//go:embed assets/report.js
	pageScript string
)

var page = template.Must(template.New("report").Funcs(template.FuncMap{
	"rate":    rate,
	"percent": func(x float64) float64 { return x * 100 },
	"bound":   func(x float64) float64 { return min(x, 100) },
	"modulo":  func(i int) int { return i % colours },
}).Parse(pageText))

// colours is how many the page has for arms.
const colours = 6

// pageData is what the page shows.
type pageData struct {
	*Report
	Script, PageScript template.JS
	Style, PageStyle   template.CSS
	Licence            string
	Tally              []tallied
	Charts             []chart
}

// chart is one scenario as the page draws it.
type chart struct {
	Outcome
	Kind   string // "bars": the arms of points that are no numbers; "lines": along the axis; "growth": cost along it, both logarithmic
	Shows  string // what is drawn
	Labels []string
	Points []int
	Lines  []line
	Rows   []row
	Has    columns
}

// line is one arm: medians, and the least and the most of all rounds. Nil where the arm did not run.
type line struct {
	Arm               string
	Median, Low, High []*float64
	Fit               []*float64 // where the fitted line is
}

// row is one arm at one point, for the table under the chart.
type row struct {
	At, Arm, Latency, Proof string
	Rounds                  int
	Median, CV, CPU, Allocs float64
	Resident, Disk, Written float64
	Shown                   float64
}

// columns are those that not every table needs.
type columns struct{ Resident, Written, Latency, Shown bool }

// WriteHTML writes the report as one page that needs nothing else.
func (r *Report) WriteHTML(w io.Writer) error {
	data := pageData{
		Report: r, Script: template.JS(chartScript), PageScript: template.JS(pageScript), Style: template.CSS(chartStyle), PageStyle: template.CSS(pageStyle),
		Licence: chartLicence, Tally: r.tally(),
	}
	for _, o := range r.Outcomes {
		c, err := o.chart()
		if err != nil {
			return err
		}
		data.Charts = append(data.Charts, c)
	}
	return page.Execute(w, data)
}

func (o *Outcome) chart() (chart, error) {
	c := chart{Outcome: *o, Kind: "lines", Shows: o.Unit + "/s", Points: o.points(), Lines: make([]line, len(o.Series))}
	switch {
	case o.Growth:
		c.Kind, c.Shows = "growth", "ns per operation"
	case len(c.Points) == 1 || len(o.Labels) > 0 && !o.ordered():
		c.Kind = "bars"
	}
	if o.Show != "" {
		c.Shows, c.Has.Shown = o.Show, true
	}
	for i := range o.Series {
		c.Lines[i].Arm = o.Series[i].Arm
	}
	for _, at := range c.Points {
		c.Labels = append(c.Labels, o.At(at))
		for i := range o.Series {
			s, err := o.shown(o.Series[i].at(at))
			if err != nil {
				return c, err
			}
			c.Lines[i].add(s, o.Series[i].Growth, at)
			if p := o.Series[i].at(at); p != nil {
				c.add(o.row(at, o.Series[i].Arm, p, s.Median))
			}
		}
	}
	return c, nil
}

// ordered reports whether points are numbers to the reader, between which a line makes sense.
func (o *Outcome) ordered() bool {
	for _, label := range o.Labels {
		if label == "" || label[0] < '0' || label[0] > '9' {
			return false
		}
	}
	return true
}

// shown summarizes what the chart is about.
func (o *Outcome) shown(p *Point) (Summary, error) {
	switch {
	case p == nil:
		return Summary{}, nil
	case o.Growth:
		return Summary{Median: 1e9 / p.Rate.Median, Min: 1e9 / p.Rate.Max, Max: 1e9 / p.Rate.Min, Count: p.Rate.Count}, nil
	}
	values, err := p.measured(o.Show)
	return summarize(values), err
}

// add draws the next point.
func (l *line) add(s Summary, fit *Fit, at int) {
	if s.Count == 0 {
		l.Median, l.Low, l.High = append(l.Median, nil), append(l.Low, nil), append(l.High, nil)
	} else {
		l.Median, l.Low, l.High = append(l.Median, &s.Median), append(l.Low, &s.Min), append(l.High, &s.Max)
	}
	if fit != nil {
		cost := fit.cost(at)
		l.Fit = append(l.Fit, &cost)
	}
}

func (o *Outcome) row(at int, arm string, p *Point, shown float64) row {
	return row{
		At: o.At(at), Arm: arm, Rounds: p.Rate.Count, Median: p.Rate.Median, CV: p.Rate.CV, Shown: shown,
		Latency: p.latency(), Proof: p.proof(),
		CPU:      p.middle(func(s Sample) float64 { return s.CPUPerOp }),
		Allocs:   p.middle(func(s Sample) float64 { return s.AllocsPerOp }),
		Resident: p.middle(func(s Sample) float64 { return s.ResidentMiB }),
		Disk:     p.middle(func(s Sample) float64 { return s.DiskMiB }),
		Written:  p.middle(func(s Sample) float64 { return s.WrittenMiB }),
	}
}

func (c *chart) add(r row) {
	c.Rows = append(c.Rows, r)
	c.Has.Resident = c.Has.Resident || r.Resident > 0
	c.Has.Written = c.Has.Written || r.Written >= 1 || r.Disk >= 1
	c.Has.Latency = c.Has.Latency || r.Latency != ""
}

// Width is how long a bar of the value is, in percent of the longest.
func (c chart) Width(value *float64) float64 {
	most := 0.0
	for _, l := range c.Lines {
		for _, high := range l.High {
			if high != nil {
				most = max(most, *high)
			}
		}
	}
	if value == nil || most == 0 {
		return 0
	}
	return 100 * *value / most
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

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
)

var page = template.Must(template.New("report").Funcs(template.FuncMap{
	"rate":    rate,
	"percent": func(x float64) float64 { return x * 100 },
}).Parse(pageText))

// pageData is what the page shows.
type pageData struct {
	*Report
	Script  template.JS
	Style   template.CSS
	Licence string
	Charts  []chart
}

// chart is one scenario as the page draws it.
type chart struct {
	Outcome
	At    []int
	Lines []line
	Rows  []row
}

// line is one arm: medians, and the slowest and the fastest round. Nil where the arm did not run.
type line struct {
	Arm               string
	Median, Low, High []*float64
}

// row is one arm at one point, for the table under the chart.
type row struct {
	At, Rounds              int
	Arm                     string
	Median, CV, CPU, Allocs float64
}

// WriteHTML writes the report as one page that needs nothing else.
func (r *Report) WriteHTML(w io.Writer) error {
	data := pageData{Report: r, Script: template.JS(chartScript), Style: template.CSS(chartStyle), Licence: chartLicence}
	for _, o := range r.Outcomes {
		data.Charts = append(data.Charts, o.chart())
	}
	return page.Execute(w, data)
}

func (o Outcome) chart() chart {
	c := chart{Outcome: o, At: o.points(), Lines: make([]line, len(o.Series))}
	for i := range o.Series {
		c.Lines[i].Arm = o.Series[i].Arm
	}
	for _, at := range c.At {
		for i := range o.Series {
			l, p := &c.Lines[i], o.Series[i].at(at)
			if p == nil {
				l.Median, l.Low, l.High = append(l.Median, nil), append(l.Low, nil), append(l.High, nil)
				continue
			}
			l.Median, l.Low, l.High = append(l.Median, &p.Rate.Median), append(l.Low, &p.Rate.Min), append(l.High, &p.Rate.Max)
			c.Rows = append(c.Rows, row{
				At: at, Arm: l.Arm, Rounds: p.Rate.Count, Median: p.Rate.Median, CV: p.Rate.CV,
				CPU:    p.middle(func(s Sample) float64 { return s.CPUPerOp }),
				Allocs: p.middle(func(s Sample) float64 { return s.AllocsPerOp }),
			})
		}
	}
	return c
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"time"
)

// Report is a whole benchmark run: what is written to bench/results/runs as JSON.
type Report struct {
	Began    time.Time `json:"began"`
	Machine  Machine   `json:"machine"`
	Command  string    `json:"command"`
	Seed     uint64    `json:"seed"`
	Smoke    bool      `json:"smoke,omitempty"` // nothing in it is a measurement
	Outcomes []Outcome `json:"scenarios"`
}

// Outcome is what one scenario measured.
type Outcome struct {
	Name    string         `json:"name"`
	About   string         `json:"about"`
	Failed  string         `json:"failed,omitempty"` // why there are no results
	Origin  string         `json:"origin,omitempty"`
	Unit    string         `json:"unit"`
	Axis    string         `json:"axis"`
	Labels  map[int]string `json:"labels,omitempty"` // of points that have one
	Growth  bool           `json:"growth,omitempty"`
	Show    string         `json:"show,omitempty"` // what the chart shows, if not the rate
	Size    int            `json:"size"`
	Full    int            `json:"full_size"`                // what Size would have been, had there been more time
	Load    int            `json:"load,omitempty"`           // records that were there before
	Seconds float64        `json:"window_seconds,omitempty"` // how long a run takes, if time ends it

	Absent map[string]string `json:"absent,omitempty"` // arms that could not run here, and why

	Series  []Series  `json:"series"`
	Figures []Verdict `json:"figures,omitempty"`
}

// Series is one arm along the axis.
type Series struct {
	Arm    string  `json:"arm"`
	Points []Point `json:"points"`
	Growth *Fit    `json:"growth,omitempty"`
}

// Point is one arm at one point of the axis, over all rounds.
type Point struct {
	At      int      `json:"at"`
	Rate    Summary  `json:"rate"`
	Samples []Sample `json:"samples"`
}

// Verdict says whether a figure was reached at one point.
type Verdict struct {
	Arm     string  `json:"arm"`
	Against string  `json:"against,omitempty"`
	At      int     `json:"at"`
	AtLeast float64 `json:"at_least"`
	Reached Ratio   `json:"reached"`
	Judged  bool    `json:"judged"` // enough rounds to say
	Met     bool    `json:"met"`
	Source  string  `json:"source"`

	Measure   string  `json:"measure,omitempty"`
	AtMost    float64 `json:"at_most,omitempty"`
	AgainstAt int     `json:"against_at,omitempty"`
}

func newOutcome(s Scenario, p plan) Outcome {
	o := Outcome{
		Name: s.Name, About: s.About, Origin: s.Origin, Unit: s.Unit, Axis: s.Axis.Name, Size: p.size, Full: p.full,
		Growth: s.Axis.Growth, Show: s.Show, Load: p.load, Seconds: p.window.Seconds(), Labels: map[int]string{},
	}
	for i, label := range s.Axis.Labels {
		o.Labels[s.Axis.Points[i]] = label
	}
	for _, arm := range s.Arms {
		o.Series = append(o.Series, Series{Arm: arm.Name})
	}
	return o
}

func (o *Outcome) series(arm string) *Series {
	i := slices.IndexFunc(o.Series, func(s Series) bool { return s.Arm == arm })
	if i < 0 {
		return nil
	}
	return &o.Series[i]
}

// at finds the point of a series, or nil.
func (s *Series) at(point int) *Point {
	if s == nil {
		return nil
	}
	i := slices.IndexFunc(s.Points, func(p Point) bool { return p.At == point })
	if i < 0 {
		return nil
	}
	return &s.Points[i]
}

func (o *Outcome) add(point int, arm string, sample Sample) {
	series := o.series(arm)
	p := series.at(point)
	if p == nil {
		series.Points = append(series.Points, Point{At: point})
		p = &series.Points[len(series.Points)-1]
	}
	p.Samples = append(p.Samples, sample)
}

// At names a point of the axis.
func (o *Outcome) At(point int) string {
	if label, ok := o.Labels[point]; ok {
		return label
	}
	return strconv.Itoa(point)
}

// rounds is how many rounds were run.
func (o *Outcome) rounds() (most int) {
	for _, s := range o.Series {
		for _, p := range s.Points {
			most = max(most, len(p.Samples))
		}
	}
	return most
}

// score says how many of the figures were met.
func (o *Outcome) score() string {
	met, judged := 0, 0
	for _, v := range o.Figures {
		if v.Judged {
			judged++
		}
		if v.Met {
			met++
		}
	}
	if judged == 0 {
		return ""
	}
	return fmt.Sprintf(", %d of %d figures met", met, judged)
}

func (p *Point) rates() []float64 {
	rates := make([]float64, len(p.Samples))
	for i, s := range p.Samples {
		rates[i] = s.Rate
	}
	return rates
}

// conclude summarizes the samples and judges the scenario's figures where there are so many of them.
func (o *Outcome) conclude(s Scenario, judged int) error {
	for i := range o.Series {
		for j := range o.Series[i].Points {
			p := &o.Series[i].Points[j]
			p.Rate = summarize(p.rates())
		}
		if s.Axis.Growth {
			o.Series[i].Growth = fit(o.Series[i].Points)
		}
	}
	for _, f := range s.Figures {
		for _, point := range s.Axis.Points {
			if f.Points == nil || slices.Contains(f.Points, point) {
				if err := o.judge(f, point, judged); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (o *Outcome) judge(f Figure, point, judged int) error {
	againstAt := point
	if f.AgainstAt != 0 {
		againstAt = f.AgainstAt
	}
	arm, against := o.series(f.Arm).at(point), o.series(f.Against).at(againstAt)
	if arm == nil || f.Against != "" && against == nil {
		return nil
	}
	v := Verdict{
		Arm: f.Arm, Against: f.Against, At: point, AtLeast: f.AtLeast, Source: f.Source,
		Measure: f.Measure, AtMost: f.AtMost, AgainstAt: f.AgainstAt,
	}
	values, err := arm.measured(f.Measure)
	if err != nil {
		return err
	}
	if f.Against == "" {
		v.Reached = bootstrap(values)
	} else {
		base, err := against.measured(f.Measure)
		if err != nil {
			return err
		}
		v.Reached = compare(values, base)
	}
	v.Reached = v.Reached.finite()
	v.Judged = len(arm.Samples) >= judged
	v.Met = v.Judged && v.reaches(v.Reached.Median)
	o.Figures = append(o.Figures, v)
	return nil
}

// Save writes the report as indented JSON.
func (r *Report) Save(name string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(name, append(text, '\n'), 0o644)
}

// Load reads a report that Save wrote.
func Load(name string) (*Report, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	r := &Report{}
	if err := json.Unmarshal(text, r); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return r, nil
}

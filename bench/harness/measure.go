package harness

import "fmt"

// What a figure can be about, apart from the rate and the counters of the arms.
const (
	// MeasureCV is the coefficient of variation of the rate over rounds.
	MeasureCV = "variation"
	// MeasureAllocs is allocations on the heap per operation, those of background work included.
	MeasureAllocs = "allocations per op"
	// MeasureP9999 and MeasureMax are latencies in milliseconds.
	MeasureP9999 = "p99.99 ms"
	MeasureMax   = "max ms"
	// MeasureP99 is the latency that one operation in a hundred exceeds, in microseconds.
	MeasureP99 = "p99 µs"
	// MeasureResident is the most memory that an isolated arm's process had.
	MeasureResident = "MiB resident"
)

// measure is one of the sample's numbers, by the name that a figure gives it. Without a name it is the rate.
func (s *Sample) measure(name string) (value float64, ok bool) {
	switch {
	case name == "":
		return s.Rate, true
	case name == MeasureAllocs:
		return s.AllocsPerOp, true
	case name == MeasureResident:
		return s.ResidentMiB, true
	case name == MeasureP9999 && s.Latency != nil:
		return s.Latency.P9999 / 1e3, true
	case name == MeasureP99 && s.Latency != nil:
		return s.Latency.P99, true
	case name == MeasureMax && s.Latency != nil:
		return s.Latency.Max / 1e3, true
	}
	value, ok = s.Counters[name]
	return value, ok
}

// measured is one number of every sample.
func (p *Point) measured(name string) ([]float64, error) {
	if name == MeasureCV {
		return []float64{p.Rate.CV}, nil
	}
	values := make([]float64, len(p.Samples))
	for i := range p.Samples {
		var ok bool
		if values[i], ok = p.Samples[i].measure(name); !ok {
			return nil, fmt.Errorf("a figure is about %q, which was not measured at %d", name, p.At)
		}
	}
	return values, nil
}

// reaches reports whether x is on the right side of the bar.
func (v *Verdict) reaches(x float64) bool {
	if v.AtMost != 0 {
		return x <= v.AtMost
	}
	return x >= v.AtLeast
}

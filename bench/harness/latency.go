package harness

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// Latency summarizes how long single operations took, in microseconds.
type Latency struct {
	P50   float64 `json:"p50_us"`
	P99   float64 `json:"p99_us"`
	P999  float64 `json:"p999_us"`
	P9999 float64 `json:"p9999_us"`
	Max   float64 `json:"max_us"`
}

// latencyMax is the longest latency that is told apart; beyond it a benchmark has failed anyway.
const latencyMax = time.Minute

// Recorder collects latencies of one goroutine.
type Recorder struct{ histogram *hdrhistogram.Histogram }

// NewRecorder returns an empty recorder of three significant digits.
func NewRecorder() *Recorder {
	return &Recorder{hdrhistogram.New(1, int64(latencyMax), 3)}
}

// Record adds one latency.
func (r *Recorder) Record(d time.Duration) {
	// The error is for values out of range, which the clamp excludes.
	_ = r.histogram.RecordValue(int64(min(max(d, 1), latencyMax)))
}

// Percentile is a percentile of merged recorders; 0 if they are empty.
func Percentile(percent float64, recorders ...*Recorder) time.Duration {
	all := hdrhistogram.New(1, int64(latencyMax), 3)
	for _, one := range recorders {
		all.Merge(one.histogram)
	}
	return time.Duration(all.ValueAtQuantile(percent))
}

// P999 is the 99.9th percentile of merged recorders in microseconds.
func P999(recorders ...*Recorder) float64 { return float64(Percentile(99.9, recorders...)) / 1e3 }

// Latencies puts the merged recorders into the run's sample.
func (r *Run) Latencies(recorders ...*Recorder) {
	all := hdrhistogram.New(1, int64(latencyMax), 3)
	for _, one := range recorders {
		all.Merge(one.histogram)
	}
	us := func(ns int64) float64 { return float64(ns) / 1e3 }
	r.sample.Latency = &Latency{
		P50: us(all.ValueAtQuantile(50)), P99: us(all.ValueAtQuantile(99)), P999: us(all.ValueAtQuantile(99.9)),
		P9999: us(all.ValueAtQuantile(99.99)), Max: us(all.Max()),
	}
}

// Lateness records how late an open loop's own arrivals were: the load generator's part in the latencies.
func (r *Run) Lateness(recorder *Recorder) {
	r.Count("arrivals late by, p99 us", float64(recorder.histogram.ValueAtQuantile(99))/1e3)
}

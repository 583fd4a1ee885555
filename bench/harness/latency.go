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

// OpenLoop calls op at a fixed arrival rate from this goroutine until count calls are made, and records each latency from
// the moment at which the call was due. So a stall counts for every call that it delayed, and not once, as in a closed loop.
func OpenLoop(rate float64, count int, into *Recorder, op func(i int) error) error {
	interval := time.Duration(float64(time.Second) / rate)
	began := time.Now()
	for i := range count {
		due := began.Add(time.Duration(i) * interval)
		if wait := time.Until(due); wait > 0 {
			time.Sleep(wait)
		}
		if err := op(i); err != nil {
			return err
		}
		into.Record(time.Since(due))
	}
	return nil
}

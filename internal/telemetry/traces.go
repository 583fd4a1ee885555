package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/tracing"
)

// TraceStats counts spans.
type TraceStats tracing.Stats

var (
	traceSpansDesc = desc("trace_spans_total", "Spans of traced requests, by what became of them: sent to the receiver; dropped, because the queue was full; failed, because the receiver did not take them.", "result")
	traceQueueDesc = desc("trace_queue_spans", "Spans that wait to be sent.")
)

func describeTraces(ch chan<- *prometheus.Desc) {
	ch <- traceSpansDesc
	ch <- traceQueueDesc
}

func (s *TraceStats) collect(ch chan<- prometheus.Metric) {
	if *s == (TraceStats{}) { // no request was traced
		return
	}
	counter(ch, traceSpansDesc, float64(s.Sent), "sent")
	counter(ch, traceSpansDesc, float64(s.Dropped), "dropped")
	counter(ch, traceSpansDesc, float64(s.Failed), "failed")
	gauge(ch, traceQueueDesc, float64(s.Queued))
}

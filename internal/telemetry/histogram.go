package telemetry

import "github.com/prometheus/client_golang/prometheus"

// histogram sends a metric made from the counts of disjoint buckets. Bucket i has the values up to
// bound(i); the last bucket has the rest. One that has counted nothing yet is not sent: a histogram is
// twenty series, and most methods of most servers are never called.
func histogram(ch chan<- prometheus.Metric, d *prometheus.Desc, buckets []uint64, sum float64, bound func(i int) float64, labels ...string) {
	for _, n := range buckets {
		if n > 0 {
			histogramFromStart(ch, d, buckets, sum, bound, labels...)
			return
		}
	}
}

// coarseHistogram is histogram with every second bucket only: its quantiles are within a factor of four, and it has half the series.
func coarseHistogram(ch chan<- prometheus.Metric, d *prometheus.Desc, buckets []uint64, sum float64, bound func(i int) float64, labels ...string) {
	pairs := make([]uint64, (len(buckets)+1)/2)
	for i, n := range buckets {
		pairs[i/2] += n
	}
	histogram(ch, d, pairs, sum, func(i int) float64 { return bound(2*i + 1) }, labels...)
}

// histogramFromStart is histogram for a metric that is sent also before it has counted anything: that nothing was
// counted says something.
func histogramFromStart(ch chan<- prometheus.Metric, d *prometheus.Desc, buckets []uint64, sum float64, bound func(i int) float64, labels ...string) {
	cumulative, count := make(map[float64]uint64, len(buckets)), uint64(0)
	for i, n := range buckets {
		count += n
		if i < len(buckets)-1 {
			cumulative[bound(i)] = count
		}
	}
	ch <- prometheus.MustNewConstHistogram(d, count, sum, cumulative, labels...)
}

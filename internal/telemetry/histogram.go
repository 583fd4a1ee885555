package telemetry

import "github.com/prometheus/client_golang/prometheus"

// histogram makes a metric from the counts of disjoint buckets. Bucket i has the values up to
// bound(i); the last bucket has the rest.
func histogram(d *prometheus.Desc, buckets []uint64, sum float64, bound func(i int) float64, labels ...string) prometheus.Metric {
	cumulative, count := make(map[float64]uint64, len(buckets)), uint64(0)
	for i, n := range buckets {
		count += n
		if i < len(buckets)-1 {
			cumulative[bound(i)] = count
		}
	}
	return prometheus.MustNewConstHistogram(d, count, sum, cumulative, labels...)
}

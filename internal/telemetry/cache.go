package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// cacheReadings are the page cache's metrics, in the order of docs/operations.md.
var cacheReadings = []reading{
	engineGauge("cache_pages", "Pages in the cache.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Resident) }),
	engineGauge("cache_hot_pages", "Pages in the hot set.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Hot) }),
	engineGauge("cache_frames", "Largest number of pages that the cache may hold.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Frames) }),
	engineFromStart("cache_hits_total", "Pages that reads of sessions found in the cache.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Hits) }),
	engineFromStart("cache_misses_total", "Pages read from the data file on demand.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Misses) }),
	engineFromStart("cache_refaults_total", "Misses of pages that were evicted recently.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Refaults) }),
	engineCounter("cache_uncached_reads_total", "Pages read without the cache because no frame was available.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Uncached) }),
	engineCounter("cache_evictions_total", "Pages of the cold set that were evicted to make room.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Evicted) }),
	engineCounter("cache_shrink_evictions_total", "Pages evicted because the cache was made smaller.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.ShrinkEvicted) }),
	engineCounter("cache_invalidations_total", "Pages removed because a checkpoint freed them.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Invalidated) }),
	engineCounter("cache_usage_decrements_total", "Usage-count decrements of hot pages.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Decremented) }),
	engineCounter("cache_clock_passes_total", "Complete passes of the clock hand.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Passes) }),
	engineCounter("cache_examined_frames_total", "Frames examined by the clock hand.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Examined) }),
	engineCounter("cache_prefetched_total", "Pages read before a scan needed them.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.Prefetched) }),
	engineCounter("cache_prefetched_used_total", "Prefetched pages that a read then used.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.PrefetchedUsed) }),
	engineCounter("cache_prefetched_wasted_total", "Prefetched pages that were evicted before a read used them.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Cache.PrefetchedWasted) }),
}

var (
	ioDesc     = desc("io_requests_total", "Requests to the device, by method.", "method")
	ioRingDesc = desc("io_ring_requests_in_flight", "Requests in io_uring rings; none if they were never used.")
	ioTimeDesc = desc("io_duration_seconds", "Duration of single reads and of batches, by method.", "method")
)

// ioCollector reads the I/O counters by method.
type ioCollector struct{ stats func() vfs.Stats }

func (c *ioCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- ioDesc
	ch <- ioRingDesc
	ch <- ioTimeDesc
}

func (c *ioCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.stats()
	counter(ch, ioDesc, float64(s.SingleReads), "single_read")
	counter(ch, ioDesc, float64(s.RingReads), "ring_read")
	counter(ch, ioDesc, float64(s.RingWrites), "ring_write")
	counter(ch, ioDesc, float64(s.PoolReads), "pool_read")
	counter(ch, ioDesc, float64(s.PoolWrites), "pool_write")
	counter(ch, ioDesc, float64(s.VectorReads), "vector_read")
	counter(ch, ioDesc, float64(s.VectorWrites), "vector_write")
	counter(ch, ioDesc, float64(s.Repeated), "repeated")
	if s.RingReads+s.RingWrites > 0 || s.InFlight > 0 {
		gauge(ch, ioRingDesc, float64(s.InFlight))
	}
	for path := range vfs.Path(vfs.Paths) {
		ioHistogram(ch, path, &s.Latencies[path])
	}
}

func ioHistogram(ch chan<- prometheus.Metric, path vfs.Path, l *vfs.Latency) {
	coarseHistogram(ch, ioTimeDesc, l.Buckets[:], l.Time.Seconds(), func(i int) float64 { return vfs.LatencyBound(i).Seconds() }, path.String())
}

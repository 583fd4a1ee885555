package telemetry

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/feed"
)

// FeedStats is a snapshot of the change stream.
type FeedStats struct {
	feed.Stats
	Streams int64 // open ones
	LagTime time.Duration
	Delays  *Delays

	GapsCrossed uint64 // differences that were sent to watches, to their end
	GapsGone    uint64 // watches that ended with HISTORY_GONE
	Watched     bool   // there has been a stream
}

// Delays counts durations in the buckets of requests.
type Delays struct {
	buckets [bucketCount + 1]atomic.Uint64
	nanos   atomic.Int64
}

// Observe counts one.
func (d *Delays) Observe(took time.Duration) {
	took = max(took, 0)
	d.buckets[min(bits.Len64(uint64(took)>>bucketShift), bucketCount)].Add(1)
	d.nanos.Add(int64(took))
}

var (
	feedStreamsDesc  = desc("feed_streams", "Open streams of watches.")
	feedWatchesDesc  = desc("feed_watches", "Open watches, by state: live, lagging (the log is read for them), or difference (the log does not reach back to them).", "state")
	feedEpochDesc    = desc("feed_epoch", "Epoch up to which commits were offered to live watches; 0 without a watch.")
	feedLagDesc      = desc("feed_lag_epochs", "Epochs that are visible and durable, and were not yet offered to live watches.")
	feedLagTimeDesc  = desc("feed_lag_seconds", "Age of the newest commit that was offered to live watches, while later ones wait; else 0.")
	feedMemoryDesc   = desc("feed_memory_bytes", "Memory of the change stream: decoded commits (ring), and what only queues of watches refer to (queues).", "kind")
	feedEventsDesc   = desc("feed_events_total", "Events that were taken for watches, each watch counted.")
	feedCatchUpDesc  = desc("feed_catchup_bytes_total", "Bytes of the log that were read for lagging watches.")
	feedLaggingDesc  = descFromStart("feed_became_lagging_total", "Live watches that became lagging because their queue was full (queue), because all queues took too much memory (memory), or because very many watches of one client wanted the same commits (fanout).", "reason")
	feedGapsDesc     = descFromStart("feed_gaps_total", "Watches to which the log did not reach back, by result: diff (the difference was sent to its end), or gone (the watch ended with HISTORY_GONE).", "result")
	feedDamagesDesc  = descFromStart("feed_damages_total", "Damages of the log that were found when it was read for watches.")
	feedDelayDesc    = desc("feed_delivery_delay_seconds", "Time from a commit to when it is sent to a watch.")
	feedDescriptions = []*prometheus.Desc{
		feedStreamsDesc, feedWatchesDesc, feedEpochDesc, feedLagDesc, feedLagTimeDesc, feedMemoryDesc, feedEventsDesc, feedCatchUpDesc,
		feedLaggingDesc, feedGapsDesc, feedDamagesDesc, feedDelayDesc,
	}
)

func (s *FeedStats) collect(ch chan<- prometheus.Metric) {
	if !s.Watched {
		return
	}
	gauge(ch, feedStreamsDesc, float64(s.Streams))
	gauge(ch, feedWatchesDesc, float64(s.Live), "live")
	gauge(ch, feedWatchesDesc, float64(s.Lagging), "lagging")
	gauge(ch, feedWatchesDesc, float64(s.Difference), "difference")
	gauge(ch, feedEpochDesc, float64(s.Epoch))
	gauge(ch, feedLagDesc, float64(s.Lag))
	gauge(ch, feedLagTimeDesc, s.LagTime.Seconds())
	gauge(ch, feedMemoryDesc, float64(s.RingBytes), "ring")
	gauge(ch, feedMemoryDesc, float64(s.QueueBytes), "queues")
	counter(ch, feedEventsDesc, float64(s.Events))
	counter(ch, feedCatchUpDesc, float64(s.CatchUpBytes))
	counter(ch, feedLaggingDesc, float64(s.BecameLagging.Queue), "queue")
	counter(ch, feedLaggingDesc, float64(s.BecameLagging.Memory), "memory")
	counter(ch, feedLaggingDesc, float64(s.BecameLagging.Fanout), "fanout")
	counter(ch, feedGapsDesc, float64(s.GapsCrossed), "diff")
	counter(ch, feedGapsDesc, float64(s.GapsGone), "gone")
	counter(ch, feedDamagesDesc, float64(s.Damages))
	if s.Delays != nil {
		s.Delays.collect(ch)
	}
}

func (d *Delays) collect(ch chan<- prometheus.Metric) {
	buckets := make([]uint64, len(d.buckets))
	for i := range d.buckets {
		buckets[i] = d.buckets[i].Load()
	}
	bound := func(i int) float64 { return float64(uint64(1)<<(bucketShift+i)) / float64(time.Second) }
	histogram(ch, feedDelayDesc, buckets, time.Duration(d.nanos.Load()).Seconds(), bound)
}

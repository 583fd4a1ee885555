package console

import (
	"context"
	"encoding/json"
	"sync"
	"time"
)

const (
	// SampleEvery is the time between two samples.
	SampleEvery = 5 * time.Second
	// samplesMax keeps an hour: 720 samples of 20 numbers are 120 KiB.
	samplesMax = int(time.Hour / SampleEvery)
)

// LatencyBuckets is how many buckets a distribution has: bucket i counts what took less than 4 us * 2^i, the last one the rest.
const LatencyBuckets = 23

// Counters are numbers of a server at one moment. Those of the first group only grow.
type Counters struct {
	Reads, Writes, Failed     uint64 // requests
	ReadLatency, WriteLatency [LatencyBuckets]uint64
	Commits, Syncs, LogBytes  uint64
	CacheHits, CacheMisses    uint64
	StallNanos                uint64
	MemoryUsed, CacheUsed     uint64 // bytes
	LiveBytes, DiskFree       int64
	Connections, Transactions int
	Watches, Snapshots        int
}

// sample is what happened between two observations, and what there was at the second. Its rates are per second, its latencies in
// seconds, 0 if there was no request.
type sample struct {
	Time         int64   `json:"t"` // milliseconds since 1970
	Reads        float64 `json:"reads"`
	Writes       float64 `json:"writes"`
	Failed       float64 `json:"failed"`
	ReadP50      float64 `json:"read_p50"`
	ReadP99      float64 `json:"read_p99"`
	WriteP50     float64 `json:"write_p50"`
	WriteP99     float64 `json:"write_p99"`
	Commits      float64 `json:"commits"`
	Syncs        float64 `json:"syncs"`
	LogBytes     float64 `json:"log_bytes"`
	Stalled      float64 `json:"stalled"`    // seconds that writers waited, per second
	HitRatio     float64 `json:"hit_ratio"`  // of the cache; -1 if no page was read
	MemoryUsed   uint64  `json:"memory"`     // bytes
	LiveBytes    int64   `json:"live_bytes"` // of the data file
	DiskFree     int64   `json:"disk_free"`  // -1 if not known
	Connections  int     `json:"connections"`
	Transactions int     `json:"transactions"`
	Watches      int     `json:"watches"`
	Snapshots    int     `json:"snapshots"`
}

// Samples are the samples of the last hour. Run adds to them; they may be read by many goroutines.
type Samples struct {
	observe func() Counters

	mu     sync.Mutex // a leaf; guards what follows
	ring   []sample   // oldest first once it is rotated by next
	next   int
	text   []byte // the ring in JSON, for all that ask before the next sample; nil until it is asked for
	last   Counters
	lastAt time.Time
}

// NewSamples makes samples of what observe returns, which must be cheap.
func NewSamples(observe func() Counters) *Samples { return &Samples{observe: observe} }

// Run takes a sample every SampleEvery until ctx ends.
func (s *Samples) Run(ctx context.Context) {
	ticker := time.NewTicker(SampleEvery)
	defer ticker.Stop()
	s.take(time.Now())
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			s.take(now)
		}
	}
}

func (s *Samples) take(now time.Time) {
	c := s.observe()
	s.mu.Lock()
	defer s.mu.Unlock()
	if seconds := now.Sub(s.lastAt).Seconds(); !s.lastAt.IsZero() && seconds > 0 {
		s.addLocked(between(&s.last, &c, now, seconds))
	}
	s.last, s.lastAt = c, now
}

func (s *Samples) addLocked(v sample) {
	s.text = nil
	if len(s.ring) < samplesMax {
		s.ring = append(s.ring, v)
		return
	}
	s.ring[s.next] = v
	s.next = (s.next + 1) % samplesMax
}

// JSON is an array of the samples, the oldest first. It is made once for each sample, however many ask for it; the caller must not change it.
func (s *Samples) JSON() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.text != nil {
		return s.text
	}
	all := make([]sample, 0, len(s.ring))
	all = append(append(all, s.ring[s.next:]...), s.ring[:s.next]...)
	text, err := json.Marshal(all)
	if err != nil {
		panic(err) // all numbers are finite
	}
	s.text = text
	return text
}

func between(a, b *Counters, now time.Time, seconds float64) sample {
	rate := func(before, after uint64) float64 { return float64(after-before) / seconds }
	v := sample{
		Time: now.UnixMilli(), Reads: rate(a.Reads, b.Reads), Writes: rate(a.Writes, b.Writes), Failed: rate(a.Failed, b.Failed),
		Commits: rate(a.Commits, b.Commits), Syncs: rate(a.Syncs, b.Syncs), LogBytes: rate(a.LogBytes, b.LogBytes),
		Stalled: rate(a.StallNanos, b.StallNanos) / float64(time.Second), HitRatio: -1,
		MemoryUsed: b.MemoryUsed, LiveBytes: b.LiveBytes, DiskFree: b.DiskFree,
		Connections: b.Connections, Transactions: b.Transactions, Watches: b.Watches, Snapshots: b.Snapshots,
	}
	if hits, misses := b.CacheHits-a.CacheHits, b.CacheMisses-a.CacheMisses; hits+misses > 0 {
		v.HitRatio = float64(hits) / float64(hits+misses)
	}
	v.ReadP50, v.ReadP99 = quantiles(&a.ReadLatency, &b.ReadLatency)
	v.WriteP50, v.WriteP99 = quantiles(&a.WriteLatency, &b.WriteLatency)
	return v
}

// quantiles are the median and the 99th percentile of what b has more than a, in seconds: the upper bounds of their buckets.
func quantiles(a, b *[LatencyBuckets]uint64) (p50, p99 float64) {
	total := uint64(0)
	for i := range b {
		total += b[i] - a[i]
	}
	return quantile(a, b, total, 0.5), quantile(a, b, total, 0.99)
}

func quantile(a, b *[LatencyBuckets]uint64, total uint64, q float64) float64 {
	const first = 4.096e-6 // seconds; twice as much for each bucket
	if total == 0 {
		return 0
	}
	bound, below := first, uint64(0)
	for i := range b {
		if below += b[i] - a[i]; float64(below) >= q*float64(total) {
			break
		}
		bound *= 2
	}
	return bound
}

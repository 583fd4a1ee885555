package telemetry

import (
	"math/bits"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/codes"
)

// Method is a kind of request. A request counts under its own method whether it came alone or through a pipeline.
type Method uint8

// Methods.
const (
	MethodGet Method = iota
	MethodPut
	MethodDelete
	MethodBatchGet
	MethodBatchWrite
	MethodDeleteRange
	MethodScan
	MethodInvoke
	MethodInvokeAll
	MethodExecute
	MethodCommit   // of an interactive transaction: from its commit request to the answer
	MethodTransact // a whole stream, from opening to end
	MethodPipeline // a whole stream, from opening to end
	MethodBulkLoad // a whole stream, from opening to end
	MethodStatus
	MethodVerify
	MethodCheckpoint
	MethodResizeCache
	MethodSpace
	methodCount
)

var methodNames = [methodCount]string{
	"Get", "Put", "Delete", "BatchGet", "BatchWrite", "DeleteRange", "Scan",
	"Invoke", "InvokeAll", "Execute", "Commit", "Transact", "Pipeline", "BulkLoad", "Status",
	"Verify", "Checkpoint", "ResizeCache", "Space",
}

// String is the method's name on the wire.
func (m Method) String() string { return methodNames[m] }

const (
	codeCount = int(codes.Unauthenticated) + 1

	// Bucket i holds durations below 2^(bucketShift+i) ns: 4 us, 8 us, ... 8.6 s. Powers of two make the bucket one
	// instruction, and finer steps answer no question that an operator asks.
	bucketShift = 12
	bucketCount = 22 // with an upper bound; one more holds the rest

	// shardCount: requests that run at once should not add to the same cache line; a scrape sums the shards.
	shardCount = 16
)

// Requests counts requests by method and code, and how long they took.
type Requests struct {
	next   atomic.Uint32
	shards [shardCount]Shard
}

// Shard is a share of the counters. Sessions take one and keep it, so that adds rarely contend. It may be used by many
// goroutines at once.
type Shard struct {
	methods [methodCount]methodCounters
	_       [128]byte // the next shard's first line is not fetched with our last
}

type methodCounters struct {
	codes    [codeCount]atomic.Uint64
	buckets  [bucketCount + 1]atomic.Uint64
	sumNanos atomic.Uint64
}

// Shard deals out the shards in turn.
func (r *Requests) Shard() *Shard { return &r.shards[r.next.Add(1)%shardCount] }

// Observe counts one finished request.
func (s *Shard) Observe(m Method, code codes.Code, took time.Duration) {
	c := &s.methods[m]
	c.codes[min(int(code), codeCount-1)].Add(1)
	nanos := uint64(max(took, 0))
	c.buckets[min(bits.Len64(nanos>>bucketShift), bucketCount)].Add(1)
	c.sumNanos.Add(nanos)
}

var (
	requestsDesc = desc("requests_total", "Requests finished, by method and status code.", "method", "code")
	durationDesc = desc("request_duration_seconds",
		"Time from receiving a request to handing its answer to the transport.", "method")
)

type requestCollector struct{ requests *Requests }

func (c *requestCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- requestsDesc
	ch <- durationDesc
}

func (c *requestCollector) Collect(ch chan<- prometheus.Metric) {
	for m := range methodCount {
		var byCode [codeCount]uint64
		var byBucket [bucketCount + 1]uint64
		var nanos uint64
		for i := range c.requests.shards {
			s := &c.requests.shards[i].methods[m]
			for k := range s.codes {
				byCode[k] += s.codes[k].Load()
			}
			for k := range s.buckets {
				byBucket[k] += s.buckets[k].Load()
			}
			nanos += s.sumNanos.Load()
		}
		for code, n := range byCode {
			// OK is there from the start, so that a rate over it never lacks its first point.
			if n > 0 || codes.Code(code) == codes.OK {
				counter(ch, requestsDesc, float64(n), m.String(), codes.Code(code).String())
			}
		}
		ch <- durationHistogram(durationDesc, byBucket, nanos, m.String())
	}
}

func durationHistogram(d *prometheus.Desc, byBucket [bucketCount + 1]uint64, sumNanos uint64, labels ...string) prometheus.Metric {
	cumulative, count := make(map[float64]uint64, bucketCount), uint64(0)
	for i, n := range byBucket {
		count += n
		if i < bucketCount {
			cumulative[time.Duration(1<<(bucketShift+i)).Seconds()] = count
		}
	}
	return prometheus.MustNewConstHistogram(d, count, time.Duration(sumNanos).Seconds(), cumulative, labels...)
}

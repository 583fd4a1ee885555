package vfs

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Path is how requests get to the device.
type Path uint8

// The paths. A batch is timed as a whole, because its caller waits for the whole batch.
const (
	PathSingleRead Path = iota // one read, on the caller's thread
	PathRing                   // a batch over io_uring
	PathPool                   // a batch over several threads' preads and pwrites
	PathVector                 // a batch of neighbours in one call, or of buffered writes, on the caller's thread
	Paths          = iota
)

var pathNames = [Paths]string{"single_read", "ring", "pool", "vector"}

// String is the name that metrics carry.
func (p Path) String() string { return pathNames[p] }

const (
	// LatencyBuckets is the number of buckets of a Latency. Bucket i counts operations shorter than LatencyBound(i), the
	// last bucket all longer ones.
	LatencyBuckets = 20
	// latencyFirst separates reads from the page cache, a few microseconds, from reads that reach a device.
	latencyFirst = 2 * time.Microsecond
)

// LatencyBound is the upper bound of bucket i: 2 us, 4 us, ... 0.5 s.
func LatencyBound(i int) time.Duration { return latencyFirst << i }

// Latency counts the operations of one path by duration.
type Latency struct {
	Buckets [LatencyBuckets]uint64
	Time    time.Duration // sum
}

// stopwatch counts durations. A goroutine writes to it after it has waited for a device, so the cost of a shared cache
// line does not matter.
type stopwatch struct {
	buckets [LatencyBuckets]atomic.Uint64
	nanos   atomic.Uint64
}

func (w *stopwatch) since(start time.Time) {
	d := time.Since(start)
	w.buckets[min(bits.Len64(uint64(d/latencyFirst)), LatencyBuckets-1)].Add(1)
	w.nanos.Add(uint64(d))
}

func (w *stopwatch) latency() (l Latency) {
	for i := range l.Buckets {
		l.Buckets[i] = w.buckets[i].Load()
	}
	l.Time = time.Duration(w.nanos.Load())
	return l
}

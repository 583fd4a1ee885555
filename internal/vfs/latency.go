package vfs

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// Path is a way that requests take to the device.
type Path uint8

// The paths. A batch is timed as a whole: it is what its caller waits for.
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
	// LatencyBuckets is the number of buckets of a Latency. Bucket i counts what took less than LatencyBound(i), the last one the rest.
	LatencyBuckets = 20
	// latencyFirst tells reads from the operating system's memory, a few microseconds, from those that reach a device.
	latencyFirst = 2 * time.Microsecond
)

// LatencyBound is the upper bound of bucket i: 2 us, 4 us, ... 0.5 s.
func LatencyBound(i int) time.Duration { return latencyFirst << i }

// Latency says how long operations of one path took.
type Latency struct {
	Buckets [LatencyBuckets]uint64
	Time    time.Duration // all together
}

// stopwatch counts durations. It is written by whoever has waited for a device, so a shared line costs nothing that matters.
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

package wal

import (
	"math/bits"
	"sync/atomic"
	"time"
)

// counters are plain atomics. The holder of the flush role and rotations write them, both rarely.
type counters struct {
	bytes, records, syncs       atomic.Uint64
	rotations, stalls, recycled atomic.Uint64
	segments, segmentBytes      atomic.Int64
	writeNanos                  atomic.Uint64
	syncNanos                   atomic.Uint64
	syncBuckets                 [SyncBuckets]atomic.Uint64
	groupBuckets                [GroupBuckets]atomic.Uint64
}

const (
	// SyncBuckets is the number of buckets for the duration of a sync: bucket i counts syncs shorter than
	// SyncBound(i), the last bucket all longer ones.
	SyncBuckets = 18
	// GroupBuckets is the number of buckets for records per sync: bucket i counts groups of at most 1<<i
	// records, the last bucket all larger ones.
	GroupBuckets = 14

	syncBucketFirst = 16 * time.Microsecond
)

// SyncBound is the upper bound of bucket i: 16 us, 32 us, ... 1 s. The last bucket has no bound.
func SyncBound(i int) time.Duration { return syncBucketFirst << i }

func (c *counters) flushed(records, bytes int, write, sync time.Duration) {
	c.records.Add(uint64(records))
	c.bytes.Add(uint64(bytes))
	c.syncs.Add(1)
	c.writeNanos.Add(uint64(write))
	c.syncNanos.Add(uint64(sync))
	c.syncBuckets[min(bits.Len64(uint64(sync/syncBucketFirst)), SyncBuckets-1)].Add(1)
	c.groupBuckets[min(bits.Len64(uint64(records-1)), GroupBuckets-1)].Add(1)
}

// Stats counts what the log has done since Open. Bytes and Records count durable records.
type Stats struct {
	Bytes, Records, Syncs uint64
	WriteTime, SyncTime   time.Duration
	SyncDurations         [SyncBuckets]uint64
	GroupSizes            [GroupBuckets]uint64
	Rotations             uint64 // segments begun because another was full
	Stalls                uint64 // rotations that waited for a segment file or buffer
	Recycled              uint64 // old files that were kept to become new segments
	Segments              int    // segments with records that a replay may need, and the open segment
	SegmentBytes          int64  // of their files
	Holders               []HolderInfo
	HoldersEnded          [HolderEndsCount]uint64 // by cause: holders that ended without their owners
	BufferBytes           int64                   // memory of all segment buffers
	PrepareFailures       uint64                  // failed attempts to prepare a segment, or to close or remove a file without needed records
	Preparing             error                   // why the last attempt to prepare a segment failed; nil after a success
}

// Stats returns the counters.
func (l *Log) Stats() Stats {
	c := &l.counts
	s := Stats{
		Bytes:     c.bytes.Load(),
		Records:   c.records.Load(),
		Syncs:     c.syncs.Load(),
		WriteTime: time.Duration(c.writeNanos.Load()),
		SyncTime:  time.Duration(c.syncNanos.Load()),
		Rotations: c.rotations.Load(),
		Stalls:    c.stalls.Load(),
		Recycled:  c.recycled.Load(),
		Segments:  int(c.segments.Load()), SegmentBytes: c.segmentBytes.Load(),
		BufferBytes:     l.buffers.mappedBytes(),
		PrepareFailures: l.preparer.count.Load(),
	}
	if p := l.preparer.failing.Load(); p != nil {
		s.Preparing = *p
	}
	s.Holders, s.HoldersEnded = l.Holders()
	for i := range s.SyncDurations {
		s.SyncDurations[i] = c.syncBuckets[i].Load()
	}
	for i := range s.GroupSizes {
		s.GroupSizes[i] = c.groupBuckets[i].Load()
	}
	return s
}

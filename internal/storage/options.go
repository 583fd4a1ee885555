package storage

import (
	"time"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

const (
	defaultPageSize    = 8192
	defaultMemoryBytes = 1 << 30
	// memtableBytesMax: in the design's prototype tables of 16 MiB took 24 to 70 % more puts than
	// tables of 64 MiB, whose index and towers leave the processor's second-level cache. Several
	// are merged at once.
	memtableBytesMax = 16 << 20
	memtableBytesMin = 1 << 20
	// memtablePart is the part of the memory for writes, as one over it, that a memtable is to take: a merge then takes several, and
	// what the log keeps in memory is a quarter at most.
	memtablePart = 32
	// checkpointBytesMax bounds the log that a restart replays, a second or two, and the memtables that
	// readers look into, unless merges are slower than writers. Merges of twice the size write about half as many pages.
	checkpointBytesMax = 128 << 20
	// reserveMergeBytesMax bounds the part of the disk reserve that is for merges: larger ones are made in
	// steps when the disk is full.
	reserveMergeBytesMax = 64 << 20
	defaultStallMax      = 10 * time.Second

	defaultStartPatience = 4 * time.Second
)

// PageSizeMax is the largest page size.
const PageSizeMax = page.SizeMax

// ValidPageSize reports whether a store may have pages of this size.
func ValidPageSize(n int) bool { return page.ValidSize(n) }

// KeyBytesMax is the longest client's key that a store with pages of this size takes.
func KeyBytesMax(pageSize int) int { return page.UserKeyMax(pageSize) }

// BatchBytesMax is the largest number of bytes of keys and values in a commit with a number of
// operations: a commit must fit into one log record. All limits above storage, on batches, values
// and the writes of a transaction, are derived from it.
func BatchBytesMax(operations int) int {
	return wal.BodyBytesMax - batch.HeaderSizeMax - operations*batch.OperationOverheadMax
}

// SegmentBytesMax is the most that Options.SegmentBytes can be.
const SegmentBytesMax = wal.SegmentBytesMax

// CacheBytesMax is the largest page cache for pages of this size.
func CacheBytesMax(pageSize int) int64 { return cache.BytesMax(pageSize) }

func (o *Options) setDefaults() {
	if o.FS == nil {
		o.FS = vfs.NewOS()
	}
	if o.DataFS == nil {
		o.DataFS = o.FS
	}
	o.setSizes()
	if o.StallMax == 0 {
		o.StallMax = defaultStallMax
	}
	if o.StartPatience == 0 {
		o.StartPatience = defaultStartPatience
	}
	if o.FeatureLevel == 0 {
		o.FeatureLevel = keys.FeatureLevelNewest
	}
}

// Sizes are the parts of memory and disk that an engine takes if its options do not name them.
type Sizes struct{ Cache, Memtable, Segment, DiskReserve int64 }

// DefaultSizes are those of an engine with so much memory.
func DefaultSizes(memory int64) Sizes {
	o := Options{MemoryBytes: memory, DiskReserve: DiskReserveDerived}
	o.setSizes()
	return Sizes{o.CacheBytes, o.MemtableBytes, o.SegmentBytes, o.DiskReserve}
}

func (o *Options) setSizes() {
	if o.PageSize == 0 {
		o.PageSize = defaultPageSize
	}
	if o.MemoryBytes == 0 {
		o.MemoryBytes = defaultMemoryBytes
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = min(o.MemoryBytes/2-o.programBytes(), CacheBytesMax(o.PageSize))
	}
	if o.MemtableBytes == 0 {
		forWrites := o.MemoryBytes - o.CacheBytes - o.programBytes()
		o.MemtableBytes = min(max(forWrites/memtablePart, memtableBytesMin), memtableBytesMax)
	}
	if o.SegmentBytes == 0 {
		// A record is a little smaller than the node it becomes, so this fills segment and memtable
		// together.
		o.SegmentBytes = o.MemtableBytes
	}
	const segmentStep = 4096
	if o.CheckpointBytes == 0 {
		o.CheckpointBytes = checkpointBytesMax
	}
	o.SegmentBytes = min(max((o.SegmentBytes+segmentStep-1)/segmentStep*segmentStep, wal.SegmentBytesMin), wal.SegmentBytesMax)
	o.setReserve()
}

const programBytesMax = 16 << 20

// programBytes is the part of the memory that is left to the process itself, whose file and tables take about 20 MiB. Without it,
// resident memory with a budget of 256 MiB was 1.2 times the budget.
func (o *Options) programBytes() int64 { return min(o.MemoryBytes/16, programBytesMax) }

// DiskReserveDerived lets Options.DiskReserve follow from the sizes of memtables and segments.
const DiskReserveDerived = -1

// reserveSegments is how many log segments are in the reserve: one that deletions go to, one for
// the next.
const reserveSegments = 2

// setReserve derives the reserve: what two checkpoints may add to the data file, since ordinary
// writes are refused only when the first has done so, and a memtable of deletions.
func (o *Options) setReserve() {
	if o.DiskReserve == DiskReserveDerived {
		o.DiskReserve = reserveSegments*o.SegmentBytes + 2*min(o.CheckpointBytes, reserveMergeBytesMax, o.immutableBytes()) + o.MemtableBytes
	}
}

// keepSegmentBytes keeps the size that the segments of an earlier run have, if that is smaller and the disk has no room for the reserve and one more
// segment of the size in the options. Otherwise the log would give up the files of its reserve, because they have another size, before it can make
// others, and deletions would be refused. It returns the size, or 0 if that of the options is used.
func (o *Options) keepSegmentBytes() (kept int64, err error) {
	if o.DiskReserve == 0 {
		return 0, nil
	}
	kept, err = wal.SmallerSegmentBytes(o.FS, o.Dir, o.SegmentBytes, o.logReserve())
	if kept == 0 || err != nil {
		return 0, err
	}
	free, unknown := o.FS.Free(wal.Dir(o.Dir))
	if full := unknown == nil && free < (reserveSegments+1)*o.SegmentBytes; !full {
		return 0, nil
	}
	o.DiskReserve = max(o.DiskReserve-reserveSegments*(o.SegmentBytes-kept), 1) // without the difference: the data file keeps as much
	o.SegmentBytes = kept
	return kept, nil
}

// logReserve is how many segments the log keeps in reserve.
func (o *Options) logReserve() int {
	if o.DiskReserve == 0 {
		return 0
	}
	return reserveSegments
}

// pagesReserve is the part of the reserve that the data file holds. A few pages are the minimum.
func (o *Options) pagesReserve() int64 {
	const pagesMin = 64
	return max(o.DiskReserve-reserveSegments*o.SegmentBytes, pagesMin*int64(o.PageSize))
}

// logBuffers is how many log segments may be in memory: enough that writers do not wait for a
// device that pauses briefly.
func (o *Options) logBuffers() int {
	const buffersMax, bytesMax = 8, 64 << 20
	return max(wal.BuffersMin, min(buffersMax, int(min(o.MemoryBytes/8, bytesMax)/o.SegmentBytes)))
}

// immutableBytes is the memory that cache, log and the active memtable leave for immutable
// memtables. It is enough for two at least: one is merged while the next one fills up.
func (o *Options) immutableBytes() int64 {
	left := o.MemoryBytes - o.programBytes() - o.CacheBytes - int64(o.logBuffers())*o.SegmentBytes - o.MemtableBytes
	return max(left, 2*o.MemtableBytes)
}

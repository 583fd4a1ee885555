package storage

import (
	"runtime"
	"time"

	"epochkv/internal/vfs"
	"epochkv/internal/wal"
)

const (
	defaultPageSize    = 8192
	defaultMemoryBytes = 1 << 30
	// memtableBytesMax: tables of 16 MiB took 24 to 70 % more puts than tables of 64 MiB, whose index and towers leave the
	// processor's second-level cache. Several are merged at once.
	memtableBytesMax   = 16 << 20
	memtableBytesMin   = 1 << 20
	checkpointBytesMax = 64 << 20
	defaultStallMax    = 10 * time.Second
)

func (o *Options) setDefaults() {
	if o.FS == nil {
		o.FS = vfs.NewOS()
	}
	if o.DataFS == nil {
		o.DataFS = o.FS
	}
	if o.PageSize == 0 {
		o.PageSize = defaultPageSize
	}
	if o.MemoryBytes == 0 {
		o.MemoryBytes = defaultMemoryBytes
	}
	if o.CacheBytes == 0 {
		o.CacheBytes = o.MemoryBytes / 2
	}
	if o.MemtableBytes == 0 {
		o.MemtableBytes = min(max(o.MemoryBytes/64, memtableBytesMin), memtableBytesMax)
	}
	if o.StallMax == 0 {
		o.StallMax = defaultStallMax
	}
	if o.CrowdedAt == 0 {
		o.CrowdedAt = crowdedAt
	}
	if o.CheckpointWorkers == 0 {
		o.CheckpointWorkers = max(1, runtime.GOMAXPROCS(0)/2)
	}
	if o.SegmentBytes == 0 {
		// A record is a little smaller than the node it becomes, so this fills segment and memtable together.
		o.SegmentBytes = o.MemtableBytes
	}
	const segmentStep = 4096
	if o.CheckpointBytes == 0 {
		o.CheckpointBytes = min(checkpointBytesMax, (o.MemoryBytes-o.CacheBytes)/4)
	}
	o.SegmentBytes = min(max((o.SegmentBytes+segmentStep-1)/segmentStep*segmentStep, wal.SegmentBytesMin), wal.SegmentBytesMax)
}

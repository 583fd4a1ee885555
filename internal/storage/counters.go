package storage

import (
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/storage/btree"
)

// counters are what the engine counts, in plain atomics, off the fast paths.
type counters struct {
	rotations, refused, stalls, stallNanos atomic.Uint64
	checkpoints, checkpointNanos           atomic.Uint64
	checkpointBuckets                      [CheckpointBuckets]atomic.Uint64
	leafPages, innerPages                  atomic.Uint64 // written
	versionsDropped, tombstonesDropped     atomic.Uint64
	leavesVacuumed, versionsVacuumed       atomic.Uint64
	blobsStored, blobsDropped              atomic.Uint64
	damaged                                atomic.Uint64 // reads that met a damaged page
	leaks                                  atomic.Uint64
}

// CheckpointBuckets is the number of duration buckets of checkpoints: under 4 ms, 8 ms, ... 67 s, and the rest.
const CheckpointBuckets = 16

// CheckpointBound is the upper bound of bucket i but the last, which has none.
func CheckpointBound(i int) time.Duration { return 4 * time.Millisecond << i }

// CheckpointStats describes the checkpoints that built the tree.
type CheckpointStats struct {
	Newest            uint64 // number of the newest state
	Finished          uint64
	Time              time.Duration
	Durations         [CheckpointBuckets]uint64 // see CheckpointBound
	LeafPages         uint64                    // written
	InnerPages        uint64                    // written
	VersionsDropped   uint64
	TombstonesDropped uint64
}

// checkpointed counts a checkpoint that took d.
func (c *counters) checkpointed(d time.Duration) {
	c.checkpoints.Add(1)
	c.checkpointNanos.Add(uint64(d))
	i := 0
	for i < CheckpointBuckets-1 && d >= CheckpointBound(i) {
		i++
	}
	c.checkpointBuckets[i].Add(1)
}

func (c *counters) merged(s *btree.Stats) {
	c.leafPages.Add(uint64(s.LeafPages))
	c.innerPages.Add(uint64(s.InnerPages))
	c.versionsDropped.Add(uint64(s.VersionsDropped))
	c.tombstonesDropped.Add(uint64(s.TombstonesDropped))
	c.leavesVacuumed.Add(uint64(s.LeavesVacuumed))
	c.versionsVacuumed.Add(uint64(s.VersionsVacuumed))
	c.blobsStored.Add(uint64(s.Stored))
	c.blobsDropped.Add(uint64(s.Dropped))
}

func (c *counters) checkpointStats() CheckpointStats {
	s := CheckpointStats{
		Finished: c.checkpoints.Load(), Time: time.Duration(c.checkpointNanos.Load()),
		LeafPages: c.leafPages.Load(), InnerPages: c.innerPages.Load(),
		VersionsDropped: c.versionsDropped.Load(), TombstonesDropped: c.tombstonesDropped.Load(),
	}
	for i := range s.Durations {
		s.Durations[i] = c.checkpointBuckets[i].Load()
	}
	return s
}

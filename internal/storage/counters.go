package storage

import (
	"sync/atomic"

	"epochkv/internal/storage/btree"
)

// counters are what the engine counts, in plain atomics, off the fast paths.
type counters struct {
	rotations, refused, stalls, stallNanos atomic.Uint64
	checkpoints, checkpointNanos           atomic.Uint64
	leafPages, innerPages                  atomic.Uint64 // written
	versionsDropped, tombstonesDropped     atomic.Uint64
	valuesPlaced, valuesDropped            atomic.Uint64
	damaged                                atomic.Uint64 // reads that met a damaged page
	leaks                                  atomic.Uint64
}

func (c *counters) merged(s *btree.Stats) {
	c.leafPages.Add(uint64(s.LeafPages))
	c.innerPages.Add(uint64(s.InnerPages))
	c.versionsDropped.Add(uint64(s.VersionsDropped))
	c.tombstonesDropped.Add(uint64(s.TombstonesDropped))
	c.valuesPlaced.Add(uint64(s.Placed))
	c.valuesDropped.Add(uint64(s.Dropped))
}

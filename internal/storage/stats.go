package storage

import (
	"time"

	"github.com/epochkv/epochkv/internal/cache"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/wal"
)

// Stats is a snapshot of the engine's counters and sizes. Sizes are bytes.
type Stats struct {
	Dir                 string
	PageSize            int
	MemoryBudget        int64
	CacheBytes          int64 // that the page cache may have
	CacheUsed           int64
	MemtableBytes       int64             // all memtables together
	DiskFree            int64             // -1 if unknown
	DiskFull            bool              // ordinary writes are refused, see ShortageError
	DiskReserve         int64             // disk space that is allocated for deletions and checkpoints
	Generations         []GenerationStats // oldest first; the last one is active
	Rotations           uint64
	MemtablesPrepared   uint64 // rotations whose memtable was prepared in the background
	Refused             uint64 // writes refused for lack of memory
	Stalls              uint64 // writes that waited until a checkpoint freed memory
	StallTime           time.Duration
	ThrottleDelayPerKiB time.Duration // how long a writer is delayed for each KiB now
	Log                 wal.Stats
	Cache               cache.Stats
	CacheHits           uint64 // pages that readers found in memory
	BatchReads          uint64 // submissions of several pages to the device
	BatchPages          uint64 // pages in them
	Tree                TreeStats
	Pages               pager.Stats
	Blobs               blob.Stats
	Pruning             PruneStats
}

// TreeStats describes the tree and the checkpoints that built it.
type TreeStats struct {
	Epoch             keys.Epoch // every commit up to it is in the tree
	Height            int
	Entries           uint64 // live keys
	EntryBytes        uint64 // of all versions
	Checkpoint        uint64 // number of the newest state
	Checkpoints       uint64 // since Open
	CheckpointTime    time.Duration
	CheckpointBuckets [CheckpointBuckets]uint64 // by duration, see CheckpointBound
	BulkLoads         uint64                    // bulk loads since Open
	BulkLoadedKeys    uint64
	BulkLoadedBytes   uint64 // keys and values
	LeafPages         uint64 // written since Open
	InnerPages        uint64
	VersionsDropped   uint64
	TombstonesDropped uint64
	Damaged           uint64  // reads of damaged pages
	Repaired          int     // superblocks and tables that Open rebuilt because they were damaged
	SkippedPages      int     // damaged pages that checkpoints skip
	Quarantined       int     // versions of keys of which the tree refused an entry, see package quarantine
	QuarantinedBytes  int     // of their keys and values
	QuarantineReason  string  // the first of their keys, and why it was refused
	DeadVersionRatio  float64 // superseded versions and tombstones, as a part of the tree; rounded up
	LeavesVacuumed    uint64  // since Open: rewritten only to drop dead versions
	VersionsVacuumed  uint64  // versions dropped from those leaves
	VacuumReads       uint64  // leaves that were read to find dead versions
	VacuumPasses      uint64  // complete passes over the leaves with superseded versions
}

// PruneStats counts the garbage collection of versions in memtables since Open.
type PruneStats struct {
	Queued, Dropped uint64 // keys queued; requests dropped because the queue was full
	Assisted        uint64 // chains that a writer pruned itself
	Pruned          uint64 // versions unlinked
	Reclaimed       uint64 // versions whose memory was reclaimed after their readers had left

	ChainLengths  [ChainBuckets]uint64 // of chains about to be pruned, see ChainBound
	ChainVersions uint64               // their sum
}

// GenerationStats describes one generation.
type GenerationStats struct {
	Segment       uint64     // number of its log segment; zero if recovery filled it from several
	First, Last   keys.Epoch // Last is zero while it is empty
	LogBytes      int64      // of its segment that are used
	MemtableBytes int64
	Keys          int64
	Versions      int64
	Active        bool
}

// Stats reads the counters.
func (e *Engine) Stats() Stats {
	v, pages := e.view.Load(), e.pages.Stats()
	s := Stats{
		Dir: e.options.Dir, PageSize: e.options.PageSize, MemoryBudget: e.options.MemoryBytes, CacheBytes: e.memory.cacheBytes.Load(),
		Rotations: e.counters.rotations.Load(), MemtablesPrepared: e.preparedTables(), Refused: e.counters.refused.Load(), Log: e.log.Stats(), DiskFree: -1,
		Stalls: e.counters.stalls.Load(), StallTime: time.Duration(e.counters.stallNanos.Load()), ThrottleDelayPerKiB: e.ThrottleDelayPerKiB(),
		Cache: pages.Cache, CacheHits: pages.Hits, BatchReads: pages.BatchReads, BatchPages: pages.BatchPages,
		Tree: e.treeStats(), Pages: e.pager.Stats(), Blobs: e.blobs.Stats(),
		Pruning: PruneStats{
			Queued: e.pruner.queued.Load(), Dropped: e.pruner.dropped.Load(), Assisted: e.pruner.assisted.Load(),
			Pruned: e.pruner.pruned.Load(), Reclaimed: e.pruner.reclaimed.Load(), ChainVersions: e.pruner.chainVersions.Load(),
		},
	}
	for i := range s.Pruning.ChainLengths {
		s.Pruning.ChainLengths[i] = e.pruner.chainLengths[i].Load()
	}
	s.DiskFull, s.DiskReserve = e.Shortage() != nil, e.reserved()
	if free, err := e.fs.Free(e.options.Dir); err == nil {
		s.DiskFree = free
	}
	for i := len(v.immutables) - 1; i >= 0; i-- {
		s.Generations = append(s.Generations, v.immutables[i].stats())
	}
	s.Generations = append(s.Generations, v.active.stats())
	s.CacheUsed = int64(s.Cache.Resident+s.Cache.Retired) * int64(s.PageSize)
	for _, g := range s.Generations {
		s.MemtableBytes += g.MemtableBytes
	}
	return s
}

func (e *Engine) treeStats() TreeStats {
	state, c := e.pager.State(), &e.counters
	s := TreeStats{
		Repaired: len(e.repaired),
		Epoch:    state.Epoch, Height: int(state.Height), Entries: state.Entries, EntryBytes: state.EntryBytes,
		Checkpoint: e.pager.Checkpoint(), Checkpoints: c.checkpoints.Load(), CheckpointTime: time.Duration(c.checkpointNanos.Load()),
		LeafPages: c.leafPages.Load(), InnerPages: c.innerPages.Load(),
		VersionsDropped: c.versionsDropped.Load(), TombstonesDropped: c.tombstonesDropped.Load(), Damaged: c.damaged.Load(),
		DeadVersionRatio: page.DeadRatio(e.checkpoints.vacuum.deadVersions.Load()).Ratio(), VacuumReads: e.checkpoints.vacuum.read.Load(),
		LeavesVacuumed: c.leavesVacuumed.Load(), VersionsVacuumed: c.versionsVacuumed.Load(), VacuumPasses: e.checkpoints.vacuum.passes.Load(),
		BulkLoads: e.bulkLoads.finished.Load(), BulkLoadedKeys: e.bulkLoads.keys.Load(), BulkLoadedBytes: e.bulkLoads.bytes.Load(),
	}
	s.SkippedPages = len(e.view.Load().repairTree.Pages())
	if q := e.view.Load().quarantine; q != nil {
		s.Quarantined, s.QuarantinedBytes, s.QuarantineReason = q.count, q.bytes, q.first
	}
	for i := range s.CheckpointBuckets {
		s.CheckpointBuckets[i] = c.checkpointBuckets[i].Load()
	}
	return s
}

func (g *generation) stats() GenerationStats {
	s := GenerationStats{
		First: g.first, Active: !g.sealed(), MemtableBytes: int64(g.mem.Bytes()), Keys: int64(g.mem.Count()), Versions: int64(g.mem.Versions()),
	}
	if g.segment != nil {
		s.Segment, s.Last, s.LogBytes = g.segment.Extent()
	} else if end := keys.Epoch(g.end.Load()); end > g.first {
		s.Last = end - 1
	}
	return s
}

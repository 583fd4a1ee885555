package storage

import (
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/wal"
)

// Stats is a snapshot of the engine's counters and sizes. Sizes are bytes. Counters count since Open.
type Stats struct {
	Dir      string
	PageSize int

	Memory       MemoryStats
	Disk         DiskStats
	Backpressure BackpressureStats

	Generations       []GenerationStats // oldest first; the last one is active
	Rotations         uint64
	MemtablesPrepared uint64 // rotations whose memtable was prepared in the background
	Pruning           PruneStats
	Log               wal.Stats

	Tree        TreeStats
	Checkpoints CheckpointStats
	Vacuum      VacuumStats
	BulkLoads   BulkLoadStats
	Damage      DamageStats
	Quarantine  QuarantineStats

	Cache pagesource.Stats
	Pages pager.Stats
	Blobs blob.Stats
}

// MemoryStats is how the memory budget is used.
type MemoryStats struct {
	Budget    int64
	Cache     int64 // that the page cache may have
	CacheUsed int64
	Memtables int64 // all memtables together
}

// DiskStats is the space of the file system that holds the store.
type DiskStats struct {
	Free    int64 // -1 if unknown
	Full    bool  // ordinary writes are refused, see ShortageError
	Reserve int64 // disk space that is allocated for deletions and checkpoints
}

// BackpressureStats describes the effects of lagging checkpoints on writers.
type BackpressureStats struct {
	Refused     uint64 // writes refused for lack of memory
	Stalls      uint64 // writes that waited until a checkpoint freed memory
	StallTime   time.Duration
	DelayPerKiB time.Duration // the current delay of writers for each KiB
}

// TreeStats describes the tree.
type TreeStats struct {
	Epoch            keys.Epoch // every commit up to it is in the tree
	Height           int
	Entries          uint64  // live keys
	UserKeys         uint64  // of them, those of clients; see userKeys
	EntryBytes       uint64  // of all versions
	DeadVersionRatio float64 // superseded versions and tombstones, as a part of the tree; rounded up
}

// VacuumStats counts the leaves that checkpoints rewrite only to drop dead versions.
type VacuumStats struct {
	Leaves   uint64 // rewritten
	Versions uint64 // dropped from those leaves
	Reads    uint64 // leaves that were read to find dead versions
	Passes   uint64 // complete passes over the leaves with superseded versions
}

// BulkLoadStats counts the bulk loads that became visible.
type BulkLoadStats struct {
	Finished uint64
	Keys     uint64
	Bytes    uint64 // keys and values
}

// DamageStats counts the damage that was found in the data file.
type DamageStats struct {
	Reads        uint64 // reads of damaged pages
	Repaired     int    // superblocks and tables that Open rebuilt because they were damaged
	Incomplete   int    // tables that Open rebuilt only in part, because the device failed reads
	SkippedPages int    // damaged pages that checkpoints skip
	RebuiltNodes uint64 // damaged inner nodes that were rebuilt
}

// QuarantineStats describes the versions of keys of which the tree refused an entry, see package quarantine.
type QuarantineStats struct {
	Versions int
	Bytes    int    // of their keys and values
	Reason   string // the first of their keys, and why it was refused
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
	c, v := &e.counters, e.view.Load()
	s := Stats{
		Dir: e.options.Dir, PageSize: e.options.PageSize,
		Disk: e.diskStats(),
		Backpressure: BackpressureStats{
			Refused: c.refused.Load(), Stalls: c.stalls.Load(), StallTime: time.Duration(c.stallNanos.Load()), DelayPerKiB: e.ThrottleDelayPerKiB(),
		},
		Generations: v.generationStats(), Rotations: c.rotations.Load(), MemtablesPrepared: e.preparedTables(), Pruning: e.pruner.stats(),
		Log: e.log.Stats(), Cache: e.pages.Stats(), Pages: e.pager.Stats(), Blobs: e.blobs.Stats(),
		Tree: e.treeStats(), Checkpoints: c.checkpointStats(),
		Vacuum: VacuumStats{
			Leaves: c.leavesVacuumed.Load(), Versions: c.versionsVacuumed.Load(),
			Reads: e.checkpoints.vacuum.read.Load(), Passes: e.checkpoints.vacuum.passes.Load(),
		},
		BulkLoads: BulkLoadStats{Finished: e.bulkLoads.finished.Load(), Keys: e.bulkLoads.keys.Load(), Bytes: e.bulkLoads.bytes.Load()},
		Damage:    DamageStats{Reads: c.damaged.Load() + e.blobs.FailedDrops(), Repaired: len(e.repairs.made), Incomplete: len(e.repairs.incomplete), SkippedPages: len(v.repairTree.Pages()), RebuiltNodes: e.rebuilds.done.Load()},
	}
	s.Checkpoints.Newest = e.pager.Checkpoint()
	if q := v.quarantine; q != nil {
		s.Quarantine = QuarantineStats{Versions: q.count, Bytes: q.bytes, Reason: q.first}
	}
	s.Memory = e.memoryStats(&s)
	return s
}

// TableBytes is the memory that the indirection table of large values takes, as of the newest checkpoint.
func (e *Engine) TableBytes() int64 { return int64(e.blobs.Stats().TableBytes) }

func (e *Engine) memoryStats(s *Stats) MemoryStats {
	m := MemoryStats{
		Budget: e.options.MemoryBytes, Cache: e.memory.cacheBytes.Load(),
		CacheUsed: int64(s.Cache.Resident+s.Cache.Retired) * int64(s.PageSize),
	}
	for _, g := range s.Generations {
		m.Memtables += g.MemtableBytes
	}
	return m
}

func (e *Engine) diskStats() DiskStats {
	s := DiskStats{Free: -1, Full: e.Shortage() != nil, Reserve: e.reserved()}
	if free, err := e.fs.Free(e.options.Dir); err == nil {
		s.Free = free
	}
	return s
}

func (e *Engine) treeStats() TreeStats {
	state := e.pager.State()
	return TreeStats{
		Epoch: state.Epoch, Height: int(state.Height), Entries: state.Entries, UserKeys: userKeys(&state), EntryBytes: state.EntryBytes,
		DeadVersionRatio: page.DeadRatio(e.checkpoints.vacuum.deadVersions.Load()).Ratio(),
	}
}

// generationStats describes the generations of the view, oldest first.
func (v *view) generationStats() (all []GenerationStats) {
	for i := len(v.immutables) - 1; i >= 0; i-- {
		all = append(all, v.immutables[i].stats())
	}
	return append(all, v.active.stats())
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

package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
)

// treeReadings are the metrics of checkpoints, the tree, the data file and the garbage collector of
// versions.
var treeReadings = []reading{
	engineCounter("bulk_loads_total", "Bulk loads that became visible.", func(s *mvcc.Stats) float64 { return float64(s.Storage.BulkLoads.Finished) }),
	engineCounter("bulk_loaded_keys_total", "Keys of bulk loads that became visible.", func(s *mvcc.Stats) float64 { return float64(s.Storage.BulkLoads.Keys) }),
	engineCounter("bulk_load_commit_pause_seconds_total", "Time during which bulk loads paused commits.",
		func(s *mvcc.Stats) float64 { return s.CommitPause.Seconds() }),
	engineWhenAny("bulk_load_commit_pause_longest_seconds", "Longest commit pause of one bulk load since start; none before the first.",
		func(s *mvcc.Stats) float64 { return s.CommitPauseMax.Seconds() }),
	engineGauge("write_amplification_ratio", "Bytes written to log and data file since start, for each byte of log records and bulk loads; zero before the first.",
		func(s *mvcc.Stats) float64 { return s.Storage.WriteAmplification() }),
	engineGauge("checkpoint_failing", "1 if the last background checkpoint failed, else 0. The server tries again.", func(s *mvcc.Stats) float64 {
		if s.CheckpointErr != nil {
			return 1
		}
		return 0
	}),
	engineGauge("checkpoint_epoch", "Every commit up to this epoch is in the data file.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Tree.Epoch) }),
	engineCounter("checkpoint_versions_dropped_total", "Dead versions that checkpoints removed while they merged.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Checkpoints.VersionsDropped) }),
	engineCounter("checkpoint_tombstones_dropped_total", "Tombstones that checkpoints removed because no older version remained.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Checkpoints.TombstonesDropped) }),
	engineGauge("tree_dead_version_ratio", "Share of tree bytes taken by superseded versions and tombstones.",
		func(s *mvcc.Stats) float64 { return s.Storage.Tree.DeadVersionRatio }),
	engineCounter("vacuum_pages_rewritten_total", "Leaves rewritten by vacuum.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Vacuum.Leaves) }),
	engineCounter("vacuum_versions_removed_total", "Dead versions removed by vacuum.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Vacuum.Versions) }),
	engineCounter("vacuum_pages_read_total", "Leaves read by vacuum.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Vacuum.Reads) }),
	engineCounter("vacuum_passes_total", "Complete vacuum passes over the tree.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Vacuum.Passes) }),
	engineFromStart("write_stalls_total", "Writes that waited for a checkpoint to free memory.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Backpressure.Stalls) }),
	engineFromStart("write_stall_seconds_total", "Time that writes waited for a checkpoint to free memory.", func(s *mvcc.Stats) float64 { return s.Storage.Backpressure.StallTime.Seconds() }),
	engineGauge("write_throttle_seconds_per_kib", "Current delay of writers for each KiB; zero while checkpoints and bulk loads keep up.",
		func(s *mvcc.Stats) float64 { return s.Storage.Backpressure.DelayPerKiB.Seconds() }),

	engineGauge("tree_height", "Levels of the tree.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Tree.Height) }),
	engineGauge("tree_keys", "Live keys of clients in the tree.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Tree.UserKeys) }),
	engineGauge("tree_bytes", "Bytes of all versions in the tree, without blobs.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Tree.EntryBytes) }),
	engineGauge("data_file_bytes", "Size of the data file.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Pages.FileBytes) }),
	engineCounter("pages_read_total", "Pages read from the data file.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Pages.PagesRead) }),
	engineCounter("pages_written_total", "Pages written to the data file.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Pages.PagesWritten) }),
	engineGauge("skipped_pages", "Damaged tree pages that checkpoints skip.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Damage.SkippedPages) }),
	engineGauge("quarantined_versions", "Versions in quarantine: the keys that they belong to have an entry that the tree refuses.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Quarantine.Versions) }),
	engineWhenAny("repaired_at_start", "Superblocks, allocation maps and indirection tables that the last start found damaged and repaired without loss; none if there was nothing to repair.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Damage.Repaired) }),
	engineWhenAny("incomplete_at_start", "Allocation maps and indirection tables that the last start could not rebuild completely, because the device failed reads; none if there were none. The next start rebuilds them again.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Damage.Incomplete) }),
	engineCounter("rebuilt_nodes_total", "Inner nodes of the tree that could not be read and were rebuilt from the pages below them.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Damage.RebuiltNodes) }),
	engineFromStart("damaged_reads_total", "Reads that met a damaged page.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Damage.Reads) }),
	engineGauge("blobs", "Values stored outside leaves.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Blobs.Blobs) }),
	engineGauge("unfreed_blobs", "Values stored outside leaves that were overwritten or deleted and keep their space, because their pages cannot be read. Checkpoints try again.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Blobs.Unfreed) }),
	engineWhenAny("blob_fill_ratio", "Share of blob page bytes in use; none without blobs.", func(s *mvcc.Stats) float64 { return s.Storage.Blobs.FillFactor }),

	engineCounter("gc_pruned_versions_total", "Versions removed from memtables.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Pruning.Pruned) }),
	engineCounter("gc_reclaimed_versions_total", "Pruned versions whose memory was reclaimed after their readers left.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Pruning.Reclaimed) }),
	engineCounter("gc_queued_keys_total", "Keys queued for pruning.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Pruning.Queued) }),
	engineCounter("gc_dropped_requests_total", "Pruning requests dropped because the queue was full. Harmless: the chain is queued again later.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Pruning.Dropped) }),
	engineCounter("gc_assists_total", "Version chains that writers pruned themselves.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Pruning.Assisted) }),
}

var checkpointDesc = desc("checkpoint_duration_seconds", "Duration of one checkpoint, bulk loads included.")

func checkpointHistogram(ch chan<- prometheus.Metric, c *storage.CheckpointStats) {
	coarseHistogram(ch, checkpointDesc, c.Durations[:], c.Time.Seconds(), func(i int) float64 { return storage.CheckpointBound(i).Seconds() })
}

var chainDesc = desc("gc_chain_length_versions", "Length of version chains when they were pruned.")

func chainHistogram(ch chan<- prometheus.Metric, p *storage.PruneStats) {
	histogram(ch, chainDesc, p.ChainLengths[:], float64(p.ChainVersions), func(i int) float64 { return float64(storage.ChainBound(i)) })
}

var kindsDesc = desc("pages_in_use", "Pages of the newest state, by each kind that it has.", "kind")

func collectKinds(ch chan<- prometheus.Metric, s *mvcc.Stats) {
	k := s.Storage.Kinds()
	send := func(pages uint64, kind string) {
		if pages > 0 {
			gauge(ch, kindsDesc, float64(pages), kind)
		}
	}
	send(k.Tree, "tree")
	send(k.Blob, "blob")
	send(k.Overflow, "overflow")
	send(k.IndirectionTable, "indirection_table")
	send(k.AllocationMap, "allocation_map")
}

var pagesDesc = desc("pages", "Pages of the data file by state.", "state")

func collectPages(ch chan<- prometheus.Metric, s *mvcc.Stats) {
	gauge(ch, pagesDesc, float64(s.Storage.Pages.Live), "live")
	gauge(ch, pagesDesc, float64(s.Storage.Pages.Pending), "pending")
	gauge(ch, pagesDesc, float64(s.Storage.Pages.Free), "free")
}

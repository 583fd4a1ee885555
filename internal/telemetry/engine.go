package telemetry

import (
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/wal"
)

// reading is one metric that is read from a snapshot of the engine's counters.
type reading struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(*mvcc.Stats) float64

	whenAny bool // a gauge that is not sent while it is zero
}

func engineGauge(name, help string, value func(*mvcc.Stats) float64) reading {
	return reading{desc: desc(name, help), kind: prometheus.GaugeValue, value: value}
}

// engineWhenAny is a gauge of things that may not exist: it is sent while it is not zero.
func engineWhenAny(name, help string, value func(*mvcc.Stats) float64) reading {
	r := engineGauge(name, help, value)
	r.whenAny = true
	return r
}

func engineCounter(name, help string, value func(*mvcc.Stats) float64) reading {
	return reading{desc: desc(name, help), kind: prometheus.CounterValue, value: value}
}

// engineFromStart is engineCounter for one that is sent from the start.
func engineFromStart(name, help string, value func(*mvcc.Stats) float64) reading {
	return reading{desc: descFromStart(name, help), kind: prometheus.CounterValue, value: value}
}

func (r *reading) send(ch chan<- prometheus.Metric, s *mvcc.Stats) {
	if r.kind == prometheus.CounterValue {
		counter(ch, r.desc, r.value(s))
	} else if v := r.value(s); v != 0 || !r.whenAny {
		gauge(ch, r.desc, v)
	}
}

// readings are the engine's metrics without labels, in the order of docs/operations.md.
var readings = []reading{
	engineGauge("visible_epoch", "Epoch that new snapshots read: every commit up to it is visible.", func(s *mvcc.Stats) float64 { return float64(s.Visible) }),
	engineGauge("durable_epoch", "Every commit up to this epoch is on stable storage.", func(s *mvcc.Stats) float64 { return float64(s.Durable) }),
	engineGauge("min_visible_epoch", "Smallest epoch that a snapshot, a snapshot lease or the retention time still needs.", func(s *mvcc.Stats) float64 { return float64(s.MinVisible) }),
	engineFromStart("commits_total", "Commits, single writes included.", func(s *mvcc.Stats) float64 { return float64(s.Commits) }),

	engineWhenAny("expiry_lag_seconds", "Time since the earliest deadline of a key that has not been deleted; none while no key is due.",
		func(s *mvcc.Stats) float64 { return s.Expiry.Lag.Seconds() }),
	engineCounter("expired_keys_total", "Keys that were deleted because their deadline had passed.",
		func(s *mvcc.Stats) float64 { return float64(s.Expiry.Expired) }),
	engineCounter("expiry_stale_entries_total", "Entries of the expiry queue that were deleted alone, because their key had got another deadline, or none.",
		func(s *mvcc.Stats) float64 { return float64(s.Expiry.Stale) }),
	engineFromStart("expiry_skipped_entries_total", "Entries of the expiry queue that were skipped, because damaged pages hide their keys; they are tried again every minute.",
		func(s *mvcc.Stats) float64 { return float64(s.Expiry.Skipped) }),
	engineCounter("expiry_commits_total", "Commits that deleted keys because of their deadlines.",
		func(s *mvcc.Stats) float64 { return float64(s.Expiry.Commits) }),
	engineGauge("clock_difference_seconds", "The system's time minus that of the store's clock, which follows it slowly.",
		func(s *mvcc.Stats) float64 { return s.ClockDifference.Seconds() }),

	engineGauge("low_watermark_epoch", "Every epoch from this one on is readable.", func(s *mvcc.Stats) float64 { return float64(s.History.LowWatermark) }),
	engineWhenAny("history_holds", "Holds, which keep all versions from their epochs on until their deadlines; none while there are none.",
		func(s *mvcc.Stats) float64 { return float64(s.History.Holds) }),
	engineCounter("history_holds_expired_total", "Holds that ended at their deadlines.", func(s *mvcc.Stats) float64 { return float64(s.History.HoldsExpired) }),
	engineCounter("history_log_read_bytes_total", "Bytes of the log that were read to find the commits of times and versions.",
		func(s *mvcc.Stats) float64 { return float64(s.History.LogBytes) }),

	engineGauge("snapshots", "Open snapshots.", func(s *mvcc.Stats) float64 { return float64(s.Snapshots.Snapshots) }),
	engineWhenAny("oldest_snapshot_age_seconds", "Age of the oldest snapshot that prevents version garbage collection; none without one.",
		func(s *mvcc.Stats) float64 { return snapshotAge(s).Seconds() }),
	engineWhenAny("snapshot_leases", "Snapshot leases of resume tokens; none while there are none.", func(s *mvcc.Stats) float64 { return float64(s.Snapshots.Leases) }),

	engineFromStart("log_append_bytes_total", "Bytes of log records made durable.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Log.Bytes) }),
	engineFromStart("log_records_total", "Log records made durable.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Log.Records) }),
	engineCounter("log_write_seconds_total", "Time spent writing log records, without syncs.",
		func(s *mvcc.Stats) float64 { return s.Storage.Log.WriteTime.Seconds() }),
	engineGauge("log_segments", "Log segments that recovery would read, the open one included.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Log.Segments) }),
	engineGauge("log_size_bytes", "Size of the log segment files.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Log.SegmentBytes) }),
	engineCounter("log_rotations_total", "Changes to a new log segment and memtable because a segment was full.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Log.Rotations) }),
	engineCounter("memtables_prepared_total", "Log rotations that used a memtable prepared in the background.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.MemtablesPrepared) }),
	engineFromStart("log_stalls_total", "Log rotations that waited for a segment file or buffer.", func(s *mvcc.Stats) float64 { return float64(s.Storage.Log.Stalls) }),
	engineFromStart("log_prepare_failures_total", "Failed attempts to prepare, close or remove a log file without needed records. They are repeated.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Log.PrepareFailures) }),
	engineCounter("log_recycled_segments_total", "Old log segment files reused as new ones.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Log.Recycled) }),

	engineGauge("memtables", "Memtables, the active one included.", func(s *mvcc.Stats) float64 { return float64(len(s.Storage.Generations)) }),
	engineGauge("memtable_keys", "Keys in all memtables; a key in several memtables counts in each.", func(s *mvcc.Stats) float64 { return float64(sumKeys(s)) }),
	engineGauge("memtable_versions", "Versions in all memtables.", func(s *mvcc.Stats) float64 { return float64(sumVersions(s)) }),
	engineFromStart("memory_refusals_total", "Writes refused because the memory budget was exhausted.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Backpressure.Refused) }),
	engineGauge("disk_full", "1 while writes other than deletions are refused because the disk is full.",
		func(s *mvcc.Stats) float64 { return oneIf(s.Storage.Disk.Full) }),
	engineGauge("disk_reserve_bytes", "Disk space reserved for deletions and checkpoints on a full disk.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Disk.Reserve) }),
	engineGauge("memory_budget_bytes", "Memory budget (--memory) for cache, memtables and log buffers together.",
		func(s *mvcc.Stats) float64 { return float64(s.Storage.Memory.Budget) }),
}

func snapshotAge(s *mvcc.Stats) time.Duration { return s.Snapshots.OldestAge }

func sumKeys(s *mvcc.Stats) (n int64) {
	for _, g := range s.Storage.Generations {
		n += g.Keys
	}
	return n
}

func sumVersions(s *mvcc.Stats) (n int64) {
	for _, g := range s.Storage.Generations {
		n += g.Versions
	}
	return n
}

var (
	memoryDesc   = desc("memory_bytes", "Memory in use, by component of the budget.", "component")
	diskFreeDesc = desc("disk_free_bytes", "Free space of the file system that holds the data directory.")
	abortsDesc   = desc("commit_aborts_total", "Commits refused because of the state of the data, by reason.", "reason")
	fsyncDesc    = desc("log_fsync_duration_seconds", "Duration of one sync of the log.")
	groupDesc    = desc("log_group_records", "Records that one sync made durable.")
	sessionDesc  = desc("session_snapshot_age_seconds", "Age of the five oldest session snapshots that prevent version garbage collection.", "session")
	failedDesc   = desc("failed", "1 after a failed write or sync has stopped the store from accepting writes, else 0.")
)

// engineCollector reads the engine once for each scrape.
type engineCollector struct {
	stats  func() mvcc.Stats
	failed func() bool
}

func (c *engineCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, r := range slices.Concat(readings, treeReadings, cacheReadings) {
		ch <- r.desc
	}
	for _, d := range []*prometheus.Desc{pagesDesc, kindsDesc, checkpointDesc, chainDesc, memoryDesc, diskFreeDesc, logHolderBytesDesc, logHoldersEndedDesc, abortsDesc, fsyncDesc, groupDesc, sessionDesc, failedDesc} {
		ch <- d
	}
}

func (c *engineCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.stats()
	for _, r := range slices.Concat(readings, treeReadings, cacheReadings) {
		r.send(ch, &s)
	}
	collectPages(ch, &s)
	collectKinds(ch, &s)
	collectLogHolders(ch, &s.Storage.Log)
	checkpointHistogram(ch, &s.Storage.Checkpoints)
	gauge(ch, memoryDesc, float64(s.Storage.Memory.CacheUsed), "cache")
	gauge(ch, memoryDesc, float64(s.Storage.Memory.Memtables), "memtables")
	gauge(ch, memoryDesc, float64(s.Storage.Log.BufferBytes), "log_buffers")
	if s.Storage.Disk.Free >= 0 {
		gauge(ch, diskFreeDesc, float64(s.Storage.Disk.Free))
	}
	counter(ch, abortsDesc, float64(s.Conflicts), "conflict")
	counter(ch, abortsDesc, float64(s.Preconditions), "precondition")
	for _, x := range s.Snapshots.Longest {
		gauge(ch, sessionDesc, x.Age.Seconds(), strconv.Itoa(x.Slot))
	}
	gauge(ch, failedDesc, oneIf(c.failed()))
	chainHistogram(ch, &s.Storage.Pruning)
	syncHistogram(ch, &s.Storage.Log)
	groupHistogram(ch, &s.Storage.Log)
}

func syncHistogram(ch chan<- prometheus.Metric, l *wal.Stats) {
	histogramFromStart(ch, fsyncDesc, l.SyncDurations[:], l.SyncTime.Seconds(), func(i int) float64 { return wal.SyncBound(i).Seconds() })
}

func groupHistogram(ch chan<- prometheus.Metric, l *wal.Stats) {
	coarseHistogram(ch, groupDesc, l.GroupSizes[:], float64(l.Records), func(i int) float64 { return float64(uint64(1) << i) })
}

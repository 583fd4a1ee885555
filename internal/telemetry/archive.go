package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/archive"
)

// ArchiveStats is a snapshot of the log archive. Without an archive there are no metrics.
type ArchiveStats struct {
	Enabled bool
	Lag     time.Duration
	archive.Status
}

var (
	archiveEpochDesc    = desc("archive_epoch", "Last epoch in the log archive; 0 before it is known.")
	archiveLagDesc      = desc("archive_lag_seconds", "Age of the newest state of which it is known that the log archive has it: the most that a loss of this machine would lose. After a start, until the archive has answered, the age of the oldest commit in the log.")
	archivePendingDesc  = desc("archive_pending_bytes", "Bytes that were read from the log and are not in the archive yet.")
	archiveUpDesc       = desc("archive_up", "1 while the log is archived, 0 while it cannot be.")
	archiveFilesDesc    = desc("archive_files_total", "Files created in the log archive.")
	archiveBytesDesc    = desc("archive_bytes_total", "Bytes of those files.")
	archiveRecordsDesc  = desc("archive_records_total", "Records in those files.")
	archiveRawDesc      = desc("archive_uncompressed_bytes_total", "Bytes of those records before compression.")
	archiveLoadsDesc    = desc("archive_bulk_loads_total", "Bulk loads in those files.")
	archiveLoadByteDesc = desc("archive_bulk_load_bytes_total", "Bytes of the objects with the entries of bulk loads that were created in the log archive.")
	archiveBreaksDesc   = descFromStart("archive_breaks_total", "How often the log archive had to begin anew, after lost log or a bulk load that was not archived: only a full backup makes what follows restorable.")
	archiveMergedDesc   = desc("archive_merged_files_total", "Small files of the log archive that were merged into larger ones.")
	archiveMergesDesc   = desc("archive_merges_total", "Files of the log archive that were made of smaller ones.")
	archiveMergeErrDesc = descFromStart("archive_merge_failures_total", "Attempts to merge files of the log archive that failed and are made again.")
	archiveFailuresDesc = descFromStart("archive_failures_total", "Attempts to archive that failed and are made again.")
)

var archiveDescriptions = []*prometheus.Desc{
	archiveEpochDesc, archiveLagDesc, archivePendingDesc, archiveUpDesc, archiveFilesDesc, archiveBytesDesc, archiveRecordsDesc, archiveRawDesc,
	archiveBreaksDesc, archiveFailuresDesc,
}

func (s *ArchiveStats) collect(ch chan<- prometheus.Metric) {
	if !s.Enabled {
		return
	}
	up := 1.0
	if s.Err != nil || !s.Connected {
		up = 0
	}
	gauge(ch, archiveEpochDesc, float64(s.Archived))
	gauge(ch, archiveLagDesc, s.Lag.Seconds())
	gauge(ch, archivePendingDesc, float64(s.Pending))
	gauge(ch, archiveUpDesc, up)
	counter(ch, archiveFilesDesc, float64(s.Files))
	counter(ch, archiveBytesDesc, float64(s.Bytes))
	counter(ch, archiveRecordsDesc, float64(s.Records))
	counter(ch, archiveRawDesc, float64(s.RawBytes))
	counter(ch, archiveLoadsDesc, float64(s.Loads.Archived))
	counter(ch, archiveLoadByteDesc, float64(s.Loads.Bytes))
	counter(ch, archiveBreaksDesc, float64(s.Breaks))
	counter(ch, archiveMergedDesc, float64(s.Merges.Merged))
	counter(ch, archiveMergesDesc, float64(s.Merges.Created))
	counter(ch, archiveMergeErrDesc, float64(s.Merges.Failures))
	counter(ch, archiveFailuresDesc, float64(s.Failures))
}

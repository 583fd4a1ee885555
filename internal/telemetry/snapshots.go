package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/wal"
)

// SnapshotEnd says why the server ended a snapshot during its request.
type SnapshotEnd uint8

// Ends of snapshots.
const (
	SnapshotTimeout  SnapshotEnd = iota // the client received nothing for --snapshot-timeout
	SnapshotOperator                    // EndSnapshot
	SnapshotEnds                        // their number
)

var snapshotEndNames = [SnapshotEnds]string{"timeout", "operator"}

// String is the cause in metrics and errors.
func (e SnapshotEnd) String() string { return snapshotEndNames[e] }

var snapshotsEndedDesc = desc("snapshots_ended_total", "Snapshots that the server ended during their request, by cause.", "cause")

var (
	logHolderBytesDesc  = desc("log_holder_bytes", "Bytes of complete log segments that are kept for readers with this name.", "name")
	logHoldersEndedDesc = descFromStart("log_holders_ended_total", "Readers of the log for which segments are not kept any more, although they had not finished, by cause.", "cause")
)

func collectLogHolders(ch chan<- prometheus.Metric, log *wal.Stats) {
	bytes := map[string]int64{}
	for i := range log.Holders {
		bytes[log.Holders[i].Name] += log.Holders[i].Bytes
	}
	for name, n := range bytes {
		if n > 0 {
			gauge(ch, logHolderBytesDesc, float64(n), name)
		}
	}
	for i, n := range log.HoldersEnded {
		counter(ch, logHoldersEndedDesc, float64(n), wal.HolderEnd(i).String())
	}
}

func collectSnapshotEnds(ch chan<- prometheus.Metric, ended *[SnapshotEnds]uint64) {
	for i, n := range ended {
		counter(ch, snapshotsEndedDesc, float64(n), SnapshotEnd(i).String())
	}
}

package telemetry

import "github.com/prometheus/client_golang/prometheus"

// SnapshotEnd says why a snapshot was taken from the request that used it.
type SnapshotEnd uint8

// Ends of snapshots.
const (
	SnapshotTimeout  SnapshotEnd = iota // the client took nothing for --snapshot-timeout
	SnapshotOperator                    // EndSnapshot
	SnapshotEnds                        // how many there are
)

var snapshotEndNames = [SnapshotEnds]string{"timeout", "operator"}

// String is the cause as metrics and errors show it.
func (e SnapshotEnd) String() string { return snapshotEndNames[e] }

var snapshotsEndedDesc = desc("snapshots_ended_total", "Snapshots that the server ended during their request, by cause.", "cause")

func collectSnapshotEnds(ch chan<- prometheus.Metric, ended *[SnapshotEnds]uint64) {
	for i, n := range ended {
		counter(ch, snapshotsEndedDesc, float64(n), SnapshotEnd(i).String())
	}
}

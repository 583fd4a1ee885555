package telemetry

import "github.com/prometheus/client_golang/prometheus"

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

func collectSnapshotEnds(ch chan<- prometheus.Metric, ended *[SnapshotEnds]uint64) {
	for i, n := range ended {
		counter(ch, snapshotsEndedDesc, float64(n), SnapshotEnd(i).String())
	}
}

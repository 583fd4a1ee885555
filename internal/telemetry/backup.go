package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// BackupStats are the backups of a server since its start.
type BackupStats struct {
	Expected          bool // there is an archive, or --backup-max-age: all metrics are sent, also before the first backup
	Running           bool
	PinnedBytes       uint64 // while one is running
	Full, Incremental BackupSuccess
	Failures          [BackupFailures]uint64
	Drills            DrillStats
}

// DrillStats are the drills of a server since its start.
type DrillStats struct {
	Expected bool // --restore-drill: the metrics are sent
	Success  time.Time
	Duration time.Duration // of that one
	Failures uint64
}

// BackupSuccess is the last backup of a kind; the zero value is none.
type BackupSuccess struct {
	Time     time.Time
	Duration time.Duration
	Bytes    int64
}

// BackupFailure says why a backup failed.
type BackupFailure int

// The reasons.
const (
	BackupOther     BackupFailure = iota // the target, the base, or the state of the store
	BackupDamage                         // a page is damaged
	BackupStalled                        // the target took nothing for two minutes
	BackupCancelled                      // by its client, or by the end of the server
	BackupFailures
)

var backupFailureNames = [BackupFailures]string{"other", "damage", "stalled", "cancelled"}

var (
	backupRunningDesc  = desc("backup_running", "1 while a backup is being made, else 0.")
	backupPinnedDesc   = desc("backup_pinned_bytes", "Bytes in the data file that wait for readers of older states while a backup is being made, else 0.")
	backupSuccessDesc  = desc("backup_last_success_timestamp_seconds", "Time at which the last backup of a kind was complete; 0 if none is known: after a start, those in the target of --archive are.", "kind")
	backupDurationDesc = desc("backup_duration_seconds", "Duration of the last complete backup of a kind; none if it was made before the start.", "kind")
	backupBytesDesc    = desc("backup_bytes", "Size of the last complete backup of a kind in the target, with the parts that the target had already.", "kind")
	drillSuccessDesc   = desc("backup_last_drill_timestamp_seconds", "Time at which the newest state of the archive was last restored and verified by --restore-drill; 0 if it was not since the start.")
	drillDurationDesc  = desc("backup_drill_duration_seconds", "Duration of that restore.")
	drillFailuresDesc  = descFromStart("backup_drill_failures_total", "Restores by --restore-drill that failed.")
	backupFailuresDesc = descFromStart("backup_failures_total", "Backups that failed or have damaged pages, by reason: a damaged page, a target that took nothing for two minutes, the end of the request, or another one.", "reason")
)

func describeBackups(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		backupRunningDesc, backupPinnedDesc, backupSuccessDesc, backupDurationDesc, backupBytesDesc, backupFailuresDesc,
		drillSuccessDesc, drillDurationDesc, drillFailuresDesc,
	} {
		ch <- d
	}
}

func (b *BackupStats) collect(ch chan<- prometheus.Metric) {
	if *b == (BackupStats{}) { // no backup is expected, and none was asked for
		return
	}
	gauge(ch, backupRunningDesc, oneIf(b.Running))
	gauge(ch, backupPinnedDesc, float64(b.PinnedBytes))
	for kind, s := range map[string]*BackupSuccess{"full": &b.Full, "incremental": &b.Incremental} {
		if s.Time.IsZero() {
			gauge(ch, backupSuccessDesc, 0, kind)
			continue
		}
		gauge(ch, backupSuccessDesc, float64(s.Time.UnixMilli())/1000, kind)
		if s.Duration > 0 {
			gauge(ch, backupDurationDesc, s.Duration.Seconds(), kind)
		}
		gauge(ch, backupBytesDesc, float64(s.Bytes), kind)
	}
	b.Drills.collect(ch)
	for i, n := range b.Failures {
		counter(ch, backupFailuresDesc, float64(n), backupFailureNames[i])
	}
}

func (d *DrillStats) collect(ch chan<- prometheus.Metric) {
	if !d.Expected {
		return
	}
	success := 0.0
	if !d.Success.IsZero() {
		success = float64(d.Success.UnixMilli()) / 1000
		gauge(ch, drillDurationDesc, d.Duration.Seconds())
	}
	gauge(ch, drillSuccessDesc, success)
	counter(ch, drillFailuresDesc, float64(d.Failures))
}

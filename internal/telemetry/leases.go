package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// LeaseStats is a snapshot of leases and locks.
type LeaseStats struct {
	Leases       int
	Waiters      int
	Lag          time.Duration
	Granted      uint64
	KeepAlives   uint64
	Expired      uint64
	Revoked      uint64
	KeysDeleted  uint64
	Acquisitions uint64
	Failures     uint64
}

var (
	leasesDesc       = desc("leases", "Leases that exist.")
	leaseLagDesc     = desc("lease_expiry_lag_seconds", "Time since the oldest deadline of a lease that has passed and whose keys are not deleted yet; 0 if there is none.")
	leaseGrantedDesc = desc("leases_granted_total", "Leases granted.")
	leaseAliveDesc   = desc("lease_keepalives_total", "Keep-alives of leases that exist.")
	leaseExpiredDesc = desc("leases_expired_total", "Leases whose deadline passed without a keep-alive.")
	leaseRevokedDesc = desc("leases_revoked_total", "Leases that ended, those that expired included.")
	leaseKeysDesc    = desc("lease_deleted_keys_total", "Keys and locks that were deleted because their lease ended.")
	leaseFailedDesc  = descFromStart("lease_failures_total", "Attempts to end a lease, or to record what is left of leases, that failed and are made again.")
	lockWaitersDesc  = desc("lock_waiters", "Requests that wait for locks or observe them.")
	lockAcquiredDesc = desc("locks_acquired_total", "Locks acquired.")
)

func describeLeases(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		leasesDesc, leaseLagDesc, leaseGrantedDesc, leaseAliveDesc, leaseExpiredDesc, leaseRevokedDesc, leaseKeysDesc, leaseFailedDesc,
		lockWaitersDesc, lockAcquiredDesc,
	} {
		ch <- d
	}
}

func (s *LeaseStats) collect(ch chan<- prometheus.Metric) {
	if *s == (LeaseStats{}) {
		return // there has never been one
	}
	gauge(ch, leasesDesc, float64(s.Leases))
	gauge(ch, leaseLagDesc, s.Lag.Seconds())
	counter(ch, leaseGrantedDesc, float64(s.Granted))
	counter(ch, leaseAliveDesc, float64(s.KeepAlives))
	counter(ch, leaseExpiredDesc, float64(s.Expired))
	counter(ch, leaseRevokedDesc, float64(s.Revoked))
	counter(ch, leaseKeysDesc, float64(s.KeysDeleted))
	counter(ch, leaseFailedDesc, float64(s.Failures))
	gauge(ch, lockWaitersDesc, float64(s.Waiters))
	counter(ch, lockAcquiredDesc, float64(s.Acquisitions))
}

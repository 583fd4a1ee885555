package telemetry

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// AbortReason says why a transaction did not commit.
type AbortReason uint8

// Abort reasons.
const (
	AbortConflict   AbortReason = iota // a concurrent commit was faster
	AbortRollback                      // its client rolled it back
	AbortFailed                        // the commit failed otherwise: limits, a full disk, an earlier request that failed
	AbortIdle                          // it waited too long for its next request
	AbortTimeout                       // it was open too long
	AbortOperator                      // EndTransaction
	AbortDisconnect                    // its stream ended
	AbortReasons                       // their number
)

var abortNames = [AbortReasons]string{"conflict", "rollback", "failed", "idle", "timeout", "operator", "disconnect"}

// String is the reason in metrics and logs.
func (r AbortReason) String() string { return abortNames[r] }

// TransactionStats is a snapshot of the transactions.
type TransactionStats struct {
	Open      int // interactive ones
	Bytes     int64
	OldestAge time.Duration
	Started   uint64
	Committed uint64
	Aborted   [AbortReasons]uint64
}

var (
	txnOpenDesc      = desc("transactions", "Open interactive transactions.")
	txnBytesDesc     = desc("transactions_bytes", "Memory of the writes and reads of open interactive transactions; none without one.")
	txnOldestDesc    = desc("oldest_transaction_age_seconds", "Age of the oldest open interactive transaction; none without one.")
	txnStartedDesc   = desc("transactions_started_total", "Transactions begun.")
	txnCommittedDesc = desc("transactions_committed_total", "Transactions committed.")
	txnAbortedDesc   = desc("transactions_aborted_total", "Transactions that did not commit, by reason.", "reason")
)

func describeTransactions(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		txnOpenDesc, txnBytesDesc, txnOldestDesc, txnStartedDesc, txnCommittedDesc, txnAbortedDesc,
	} {
		ch <- d
	}
}

func (s *TransactionStats) collect(ch chan<- prometheus.Metric) {
	gauge(ch, txnOpenDesc, float64(s.Open))
	if s.Open > 0 {
		gauge(ch, txnBytesDesc, float64(s.Bytes))
		gauge(ch, txnOldestDesc, s.OldestAge.Seconds())
	}
	counter(ch, txnStartedDesc, float64(s.Started))
	counter(ch, txnCommittedDesc, float64(s.Committed))
	for r, n := range s.Aborted {
		counter(ch, txnAbortedDesc, float64(n), AbortReason(r).String())
	}
}

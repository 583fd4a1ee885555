package telemetry

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
)

// ObserverStats counts what is noted of requests at their end.
type ObserverStats struct {
	SlowRequests uint64 // above the threshold
	Audit        AuditStats
	Traces       TraceStats
}

// RefusalStats counts what was refused, and connections that were closed because of their clients.
type RefusalStats struct {
	Violations  []Violation
	Connections uint64 // over the limit of connections
	Requests    uint64 // over the limit of requests or bytes in flight
	Expired     uint64 // requests whose deadline had passed before work began
}

// ServerStats is a snapshot of the RPC layer.
type ServerStats struct {
	Connections      int
	Streams          int   // open streams
	InflightRequests int   // being executed or waiting to be acknowledged
	InflightBytes    int64 // of requests being executed
	AnswerBytes      int64 // of answers that the transport has not sent yet
	Sessions         int   // engine sessions, in use or pooled
	Draining         bool

	Refusals RefusalStats

	Deduplicated  uint64 // requests whose answer was that of an earlier attempt
	RequestCutoff uint64 // up to which time request ids are refused, in milliseconds since 1970

	SnapshotsEnded [SnapshotEnds]uint64

	Transactions TransactionStats
	Leases       LeaseStats
	Feed         FeedStats
	TLS          TLSStats
	Archive      ArchiveStats

	Backups BackupStats

	ObserverStats
}

// Violation counts what clients did against the protocol, of one kind.
type Violation struct {
	Kind  string
	Count uint64
}

var (
	connectionsDesc      = desc("connections", "Open client connections.")
	streamsDesc          = desc("streams", "Open pipelines, scans and transaction streams.")
	inflightRequestsDesc = desc("inflight_requests", "Requests that are being executed or wait to be acknowledged.")
	deduplicatedDesc     = desc("requests_deduplicated_total", "Requests that were executed before, by another attempt with their request_id.")
	requestCutoffDesc    = desc("request_id_cutoff_timestamp_seconds", "Time up to which request ids are refused; 0 if none was needed. Beyond all times while it cannot be read.")
	inflightBytesDesc    = desc("inflight_bytes", "Bytes of requests that are being executed.")
	answerBytesDesc      = desc("answer_bytes", "Bytes of answers of 4 KiB or more that are not sent yet.")
	sessionsDesc         = desc("sessions", "Engine sessions of the server, in use or pooled.")
	drainingDesc         = desc("draining", "1 while the server is shutting down, else 0.")
	slowRequestsDesc     = desc("slow_requests_total", "Requests that took longer than --slow-request-threshold.")
	violationsDesc       = desc("connection_violations_total", "Connections closed because of what their clients sent, or did not send or take in time, by kind; of kind header_list, requests refused.", "kind")
	rejectionsDesc       = descFromStart("rejections_total", "Connections and requests refused before they began, by the limit that was reached.", "limit")
)

type serverCollector struct{ stats func() ServerStats }

func (c *serverCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		connectionsDesc, streamsDesc, inflightRequestsDesc, inflightBytesDesc, answerBytesDesc, sessionsDesc, drainingDesc, rejectionsDesc, violationsDesc,
		snapshotsEndedDesc, deduplicatedDesc, requestCutoffDesc, slowRequestsDesc,
	} {
		ch <- d
	}
	describeTransactions(ch)
	describeLeases(ch)
	describeTLS(ch)
	describeBackups(ch)
	describeAudit(ch)
	describeTraces(ch)
	for _, d := range slices.Concat(feedDescriptions, archiveDescriptions) {
		ch <- d
	}
}

func (c *serverCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.stats()
	gauge(ch, connectionsDesc, float64(s.Connections))
	gauge(ch, streamsDesc, float64(s.Streams))
	s.Archive.collect(ch)
	gauge(ch, inflightRequestsDesc, float64(s.InflightRequests))
	gauge(ch, inflightBytesDesc, float64(s.InflightBytes))
	gauge(ch, answerBytesDesc, float64(s.AnswerBytes))
	gauge(ch, sessionsDesc, float64(s.Sessions))
	gauge(ch, drainingDesc, oneIf(s.Draining))
	counter(ch, rejectionsDesc, float64(s.Refusals.Connections), "connections")
	counter(ch, rejectionsDesc, float64(s.Refusals.Requests), "inflight")
	counter(ch, rejectionsDesc, float64(s.Refusals.Expired), "deadline")
	for _, v := range s.Refusals.Violations {
		counter(ch, violationsDesc, float64(v.Count), v.Kind)
	}
	counter(ch, slowRequestsDesc, float64(s.SlowRequests))
	counter(ch, deduplicatedDesc, float64(s.Deduplicated))
	gauge(ch, requestCutoffDesc, float64(s.RequestCutoff)/1000)
	collectSnapshotEnds(ch, &s.SnapshotsEnded)
	s.Transactions.collect(ch)
	s.Leases.collect(ch)
	s.Feed.collect(ch)
	s.Audit.collect(ch)
	s.Traces.collect(ch)
	s.TLS.collect(ch)
	s.Backups.collect(ch)
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

package telemetry

import "github.com/prometheus/client_golang/prometheus"

// AuditStats counts lines of the audit log.
type AuditStats struct {
	Enabled                  bool
	Written, Dropped, Errors uint64
	QueueBytes               int
}

var (
	auditLinesDesc  = descFromStart("audit_lines_total", "Lines of the audit log, by what became of them.", "result")
	auditErrorsDesc = descFromStart("audit_errors_total", "Failed writes of the audit log; each is repeated every second.")
	auditQueueDesc  = desc("audit_queue_bytes", "Bytes of lines that wait to be written to the audit log.")
)

func describeAudit(ch chan<- *prometheus.Desc) {
	ch <- auditLinesDesc
	ch <- auditErrorsDesc
	ch <- auditQueueDesc
}

func (s *AuditStats) collect(ch chan<- prometheus.Metric) {
	if !s.Enabled {
		return
	}
	counter(ch, auditLinesDesc, float64(s.Written), "written")
	counter(ch, auditLinesDesc, float64(s.Dropped), "dropped")
	counter(ch, auditErrorsDesc, float64(s.Errors))
	gauge(ch, auditQueueDesc, float64(s.QueueBytes))
}

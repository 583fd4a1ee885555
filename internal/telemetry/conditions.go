package telemetry

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/health"
)

var conditionDesc = desc("condition", "1 while a health condition is active; no series otherwise. Severity unavailable makes health checks fail.", "name", "severity")

// conditionCollector reads the list of conditions. Names are a fixed set, so the number of series
// is bounded.
type conditionCollector struct{ conditions func() []health.Condition }

func (c *conditionCollector) Describe(ch chan<- *prometheus.Desc) { ch <- conditionDesc }

func (c *conditionCollector) Collect(ch chan<- prometheus.Metric) {
	for _, active := range c.conditions() {
		gauge(ch, conditionDesc, 1, active.Name, active.Severity.String())
	}
}

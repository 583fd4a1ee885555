// Package telemetry makes Prometheus metrics, log lines and a version from the server's counters.
//
// The engine and the server count in plain atomics and do not know the metrics library. Collectors
// take a snapshot of the counters when Prometheus asks, so that a scrape costs the hot path nothing
// and a request costs three uncontended adds.
//
// Invariants: every metric begins with kvserver_ and follows the Prometheus rules for names (base
// units, _total on counters; a test lints all of them); no label has a value that clients choose,
// so the number of series is fixed.
//
// The package serves no HTTP itself and starts no goroutine.
package telemetry

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Sources are read at each scrape.
type Sources struct {
	Requests   *Requests
	Server     func() ServerStats
	Engine     func() mvcc.Stats
	Failed     func() bool // the store has stopped accepting writes
	IO         func() vfs.Stats
	Conditions func() []health.Condition
}

// NewRegistry makes a registry (not the library's global one) with every metric of this process.
func NewRegistry(s Sources) *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		buildInfo(),
		&requestCollector{s.Requests},
		&serverCollector{s.Server},
		&engineCollector{s.Engine, s.Failed},
		&ioCollector{s.IO},
		&conditionCollector{s.Conditions},
	)
	return r
}

// Handler answers scrapes. Few may run at once, because each takes a snapshot of the engine's
// counters.
func Handler(r *prometheus.Registry) http.Handler {
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{MaxRequestsInFlight: 4})
}

// desc describes a metric of the server.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvserver_"+name, help, labels, nil)
}

func counter(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
}

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func buildInfo() prometheus.Collector {
	b := Build()
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "kvserver_build_info",
		Help: "Always 1; the labels identify the build.",
	}, []string{"version", "revision", "goversion"})
	g.WithLabelValues(b.Version, b.Revision, b.Go).Set(1)
	return g
}

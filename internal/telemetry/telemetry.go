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
// The package serves no HTTP itself. Its one goroutine writes the log (StartLog).
package telemetry

import (
	"net/http"
	"regexp"
	"time"

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
		&runtimeCollector{
			// Of the thirty figures of Go's allocator the live heap is enough; profiles have the rest.
			collectors.NewGoCollector(
				collectors.WithGoCollectorMemStatsMetricsDisabled(),
				collectors.WithGoCollectorRuntimeMetrics(collectors.GoRuntimeMetricsRule{Matcher: regexp.MustCompile("^/(memory/classes/heap/objects:bytes|cpu/classes/gc/total:cpu-seconds)$")}),
			),
		},
		&runtimeCollector{collectors.NewProcessCollector(collectors.ProcessCollectorOpts{})},
		buildInfo(),
		&requestCollector{s.Requests},
		&serverCollector{s.Server},
		&engineCollector{s.Engine, s.Failed},
		&ioCollector{s.IO},
		&conditionCollector{s.Conditions},
	)
	return r
}

// A scrape reads all counters of the engine and of the process, which takes a millisecond or two of a processor. So clients take turns, and after each
// scrape there is a pause: together they have a part of one processor, however many ask without end.
const (
	scrapeTimeout  = 10 * time.Second      // what Prometheus waits for by default
	scrapePause    = 4                     // times as long as the scrape before
	scrapePauseMax = 50 * time.Millisecond // a scrape takes long if it waits for a processor
)

// Handler answers scrapes, one in each turn, which enter waits for and leave ends. A client that takes nothing of its answer has no turn:
// http.TimeoutHandler sends what was written in the turn.
func Handler(r *prometheus.Registry, enter func(*http.Request) (leave func(), err error)) http.Handler {
	const late = "the counters were not read in time\n"
	scrape := promhttp.HandlerFor(r, promhttp.HandlerOpts{})
	var next time.Time // when the pause is over; of the one that has the turn
	inTurn := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if leave, err := enter(req); err == nil {
			defer leave()
			select {
			case <-time.After(time.Until(next)):
				began := time.Now()
				scrape.ServeHTTP(w, req)
				now := time.Now()
				next = now.Add(min(scrapePause*now.Sub(began), scrapePauseMax))
				return
			case <-req.Context().Done():
			}
		}
		http.Error(w, late, http.StatusServiceUnavailable)
	})
	return http.TimeoutHandler(inTurn, scrapeTimeout, late)
}

// desc describes a metric of the server.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("kvserver_"+name, help, labels, nil)
}

// fromStart are the counters of what should not happen, and of what always does. They are sent from the start: an alert looks for
// their increase, which cannot be seen of a counter that appears with its first one.
var fromStart = map[*prometheus.Desc]bool{}

// descFromStart describes such a counter.
func descFromStart(name, help string, labels ...string) *prometheus.Desc {
	d := desc(name, help, labels...)
	fromStart[d] = true
	return d
}

// counter sends a counter of work once it has counted something: most servers never do most kinds of work.
func counter(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	if v > 0 || fromStart[d] {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
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

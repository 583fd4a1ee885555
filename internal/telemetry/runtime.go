package telemetry

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// runtimeLeftOut are metrics of the library's collectors that say little about a server: constants of its start, and figures of which a
// better one is sent. The pauses of Go's collector are below a millisecond; the processor time that it takes is what slows a server.
var runtimeLeftOut = []string{
	"go_gc_duration_seconds", "go_gc_gogc_percent", "go_gc_gomemlimit_bytes", "go_info", "go_memstats_last_gc_time_seconds",
	"go_sched_gomaxprocs_threads", "go_threads",
	"process_network_receive_bytes_total", "process_network_transmit_bytes_total", "process_virtual_memory_bytes", "process_virtual_memory_max_bytes",
}

// runtimeCollector sends what a collector of the library sends, without what is left out.
type runtimeCollector struct{ all prometheus.Collector }

func (c *runtimeCollector) Describe(ch chan<- *prometheus.Desc) { c.all.Describe(ch) }

func (c *runtimeCollector) Collect(ch chan<- prometheus.Metric) {
	all := make(chan prometheus.Metric)
	go func() {
		defer close(all)
		c.all.Collect(all)
	}()
	for m := range all {
		if !leftOut(m.Desc()) {
			ch <- m
		}
	}
}

func leftOut(d *prometheus.Desc) bool {
	text := d.String() // a Desc tells its name in no other way
	for _, name := range runtimeLeftOut {
		if strings.Contains(text, `fqName: "`+name+`"`) {
			return true
		}
	}
	return false
}

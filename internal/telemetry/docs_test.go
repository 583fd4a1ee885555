package telemetry

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/epochkv/epochkv/internal/doctable"
)

// TestMetricTableIsThatOfTheCode keeps the operators' table equal to what a scrape says.
func TestMetricTableIsThatOfTheCode(t *testing.T) {
	families, err := NewRegistry(testSources()).Gather()
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	b.WriteString(doctable.Head("metric", "type", "meaning"))
	for _, f := range families {
		if strings.HasPrefix(f.GetName(), "kvserver_") {
			b.WriteString(doctable.Row("`"+f.GetName()+labels(f)+"`", strings.ToLower(f.GetType().String()), f.GetHelp()))
		}
	}
	doctable.Check(t, "../../docs/operations.md", "metrics", b.String())
}

func labels(f *dto.MetricFamily) string {
	var names []string
	for _, m := range f.GetMetric() {
		for _, l := range m.GetLabel() {
			if !slices.Contains(names, l.GetName()) {
				names = append(names, l.GetName())
			}
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "{" + strings.Join(names, ",") + "}"
}

var descName = regexp.MustCompile(`fqName: "(kvserver_[a-z_]+)"`)

// TestTestSourcesShowEveryMetric keeps a metric without a sample from missing in the table.
func TestTestSourcesShowEveryMetric(t *testing.T) {
	r := NewRegistry(testSources())
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	descs := make(chan *prometheus.Desc, 1024)
	r.Describe(descs)
	close(descs)
	for d := range descs {
		match := descName.FindStringSubmatch(d.String())
		if match != nil && !slices.ContainsFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == match[1] }) {
			t.Errorf("%s has no sample", match[1])
		}
	}
}

package telemetry

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestWhatWasNeverUsedHasNoHistogram keeps the scrape of a server that does little small: each method has 25 series in its
// histogram.
func TestWhatWasNeverUsedHasNoHistogram(t *testing.T) {
	requests := new(Requests)
	requests.Shard().Observe(MethodGet, codes.OK, time.Millisecond)
	families, err := NewRegistry(Sources{
		Requests: requests, Server: func() ServerStats { return ServerStats{Feed: FeedStats{Delays: new(Delays)}} },
		Engine: func() mvcc.Stats { return mvcc.Stats{} }, Failed: func() bool { return false },
		IO: func() vfs.Stats { return vfs.Stats{} }, Conditions: func() []health.Condition { return nil },
	}).Gather()
	if err != nil {
		t.Fatal(err)
	}
	histograms := 0
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if h := m.GetHistogram(); h != nil && strings.HasPrefix(f.GetName(), "kvserver_") {
				histograms++
				if h.GetSampleCount() == 0 && f.GetName() != "kvserver_log_fsync_duration_seconds" { // a server that does not sync is found out by it
					t.Errorf("%s has a histogram of nothing: %v", f.GetName(), m.GetLabel())
				}
			}
		}
	}
	if histograms != 2 {
		t.Errorf("%d histograms, want those of Get and of syncs", histograms)
	}
}

func TestTotalsSumUpTheMethods(t *testing.T) {
	requests := new(Requests)
	for range 3 * shardCount {
		s := requests.Shard()
		s.Observe(MethodGet, codes.OK, 5*time.Microsecond)
		s.Observe(MethodBatchGet, codes.NotFound, 5*time.Microsecond)
		s.Observe(MethodPut, codes.OK, time.Second)
	}
	got := requests.Totals(MethodGet, MethodBatchGet)
	if got.Count != 6*shardCount || got.Failed != 3*shardCount || got.Latency[1] != 6*shardCount {
		t.Errorf("%+v", got)
	}
}

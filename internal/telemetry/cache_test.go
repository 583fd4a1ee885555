package telemetry

import (
	"context"
	"encoding/binary"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCacheMetricsMoveWithTheReads reads data that is larger than the cache, in every way there is,
// and looks at each metric of cache and device.
func TestCacheMetricsMoveWithTheReads(t *testing.T) {
	const count, scans = 20_000, 40
	files, err := vfs.OpenOS(vfs.IOAuto)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = files.Close() }()
	store, err := mvcc.Open(mvcc.Options{Durability: mvcc.DurabilityAsync, Storage: storage.Options{
		Dir: t.TempDir(), FS: files, MemoryBytes: 64 << 20, CacheBytes: 512 << 10, PageSize: 4096,
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = store.Close() }()
	session, err := store.Session()
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close()
	key := func(i int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(i)) }
	var w mvcc.Write
	for i := range count {
		w.Set(key(i), make([]byte, 100))
	}
	if _, err := session.Commit(context.Background(), &w); err != nil {
		t.Fatal(err)
	}
	if err := store.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	before := valuesOf(t, store, files)
	var batch [][]byte
	for i := range count {
		if _, err := session.Get(nil, key(i*7919%count), 0); err != nil {
			t.Fatal(err)
		}
		if i%100 == 0 {
			batch = append(batch, key(i))
		}
	}
	if _, err := session.OpenSnapshot(0); err != nil {
		t.Fatal(err)
	}
	if err := session.ReadAll(t.Context(), batch, func(int, mvcc.Value) error { return nil }); err != nil {
		t.Fatal(err)
	}
	for i := range scans {
		cursor, err := session.Scan(mvcc.ScanOptions{Lower: key(i * count / scans), Upper: key((i + 1) * count / scans)})
		if err != nil {
			t.Fatal(err)
		}
		for cursor.Next() {
			_ = cursor.Value()
		}
		cursor.Close()
	}
	session.CloseSnapshot()
	after := valuesOf(t, store, files)
	for _, name := range []string{
		"cache_hits_total", "cache_misses_total", "cache_refaults_total", "cache_evictions_total", "cache_usage_decrements_total", "cache_clock_passes_total",
		"cache_examined_frames_total", "cache_prefetched_total", "cache_prefetched_used_total", "pages_read_total",
		"io_requests_total single_read", "io_duration_seconds single_read",
	} {
		if after["kvserver_"+name] <= before["kvserver_"+name] {
			t.Errorf("%s was %g and is %g", name, before["kvserver_"+name], after["kvserver_"+name])
		}
	}
	ways := after["kvserver_io_duration_seconds ring"] + after["kvserver_io_duration_seconds pool"] + after["kvserver_io_duration_seconds vector"]
	if ways <= before["kvserver_io_duration_seconds ring"]+before["kvserver_io_duration_seconds pool"]+before["kvserver_io_duration_seconds vector"] {
		t.Error("no batch was timed")
	}
	if hot, all := after["kvserver_cache_hot_pages"], after["kvserver_cache_pages"]; hot == 0 || hot > all || all > after["kvserver_cache_frames"] {
		t.Errorf("%g pages are hot, of %g in %g frames", hot, all, after["kvserver_cache_frames"])
	}
	// A get visits each level once, and what it does not find in memory it reads.
	visits := after["kvserver_cache_hits_total"] - before["kvserver_cache_hits_total"] + after["kvserver_cache_misses_total"] - before["kvserver_cache_misses_total"]
	if least := float64(count) * after["kvserver_tree_height"]; visits < least || visits > least*1.2 {
		t.Errorf("%g visits for %d gets in a tree of %g levels and a few scans", visits, count, after["kvserver_tree_height"])
	}
}

// valuesOf reads all metrics of a store: name, and label if there is one; of histograms the count.
func valuesOf(t *testing.T, store *mvcc.Store, files *vfs.OS) map[string]float64 {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(&engineCollector{store.Stats, func() bool { return false }}, &ioCollector{files.Stats})
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			switch {
			case m.GetCounter() != nil:
				values[name] = m.GetCounter().GetValue()
			case m.GetHistogram() != nil:
				values[name] = float64(m.GetHistogram().GetSampleCount())
			default:
				values[name] = m.GetGauge().GetValue()
			}
		}
	}
	return values
}

package telemetry

import (
	"bytes"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc/codes"

	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

func testSources() Sources {
	requests := new(Requests)
	for m := range methodCount {
		requests.Shard().Observe(m, codes.OK, time.Millisecond)
	}
	delays := new(Delays)
	delays.Observe(time.Millisecond)
	var io vfs.Stats
	io.RingReads = 6
	for path := range io.Latencies {
		io.Latencies[path].Buckets[1] = 1
	}
	fill(reflect.ValueOf(&io).Elem())
	return Sources{
		Requests: requests,
		Server: func() ServerStats {
			s := ServerStats{Connections: 3, Refusals: RefusalStats{Violations: []Violation{{Kind: "protocol", Count: 1}}}, Feed: FeedStats{Delays: delays}, TLS: TLSStats{Listeners: []string{"grpc"}}, Archive: ArchiveStats{Enabled: true}, Backups: BackupStats{Full: BackupSuccess{Time: time.Unix(1, 0), Duration: time.Second}, Drills: DrillStats{Expected: true, Success: time.Unix(1, 0)}}}
			fill(reflect.ValueOf(&s).Elem())
			return s
		},
		Engine: func() mvcc.Stats {
			s := mvcc.Stats{Visible: 7, Storage: storage.Stats{Generations: []storage.GenerationStats{{Keys: 2}, {Keys: 3}}}}
			s.Storage.Log.SyncDurations[2], s.Storage.Log.SyncDurations[wal.SyncBuckets-1], s.Storage.Log.SyncTime = 4, 1, time.Second
			s.Storage.Log.GroupSizes[0], s.Storage.Log.Records = 5, 5
			s.Storage.Checkpoints.Durations[1], s.Storage.Pruning.ChainLengths[1] = 1, 1
			s.Storage.Log.Holders = []wal.HolderInfo{{HolderOptions: wal.HolderOptions{Name: "checkpoint"}, Bytes: 8}}
			s.Snapshots.Longest = []pin.Snapshot{{Slot: 3, Age: time.Minute}}
			fill(reflect.ValueOf(&s).Elem())
			return s
		},
		Failed: func() bool { return true },
		IO:     func() vfs.Stats { return io },
		Conditions: func() []health.Condition {
			return []health.Condition{{Name: "checkpoints-failing", Severity: health.Degraded}}
		},
	}
}

// fill lets every number that is zero be one, so that everything has counted something.
func fill(v reflect.Value) {
	switch v.Kind() { //nolint:exhaustive // others are no numbers
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				fill(v.Field(i))
			}
		}
	case reflect.Array:
		for i := range v.Len() {
			fill(v.Index(i))
		}
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint64, reflect.Uint32, reflect.Int, reflect.Int64, reflect.Float64:
		if v.IsZero() {
			v.Set(reflect.ValueOf(1).Convert(v.Type()))
		}
	}
}

// TestNamesFollowTheRules is what promtool check metrics looks at, for every metric.
func TestNamesFollowTheRules(t *testing.T) {
	problems, err := testutil.GatherAndLint(NewRegistry(testSources()))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestEveryMetricOfOursHasThePrefixAndOursAlone(t *testing.T) {
	families, err := NewRegistry(testSources()).Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		name := f.GetName()
		if !strings.HasPrefix(name, "kvserver_") && !strings.HasPrefix(name, "go_") && !strings.HasPrefix(name, "process_") {
			t.Errorf("%s", name)
		}
		if f.GetHelp() == "" {
			t.Errorf("%s has no help", name)
		}
	}
}

func TestCountsReachTheMetrics(t *testing.T) {
	s := testSources()
	for range 3 {
		s.Requests.Shard().Observe(MethodGet, codes.NotFound, 5*time.Microsecond)
	}
	s.Requests.Shard().Observe(MethodGet, codes.Code(99), time.Hour) // an unknown code and an absurd time must not crash
	err := testutil.GatherAndCompare(NewRegistry(s), strings.NewReader(`
# HELP kvserver_requests_total Requests finished, by method and status code.
# TYPE kvserver_requests_total counter
kvserver_requests_total{code="NotFound",method="Get"} 3
kvserver_requests_total{code="OK",method="AcquireLock"} 1
kvserver_requests_total{code="OK",method="ArchiveStatus"} 1
kvserver_requests_total{code="OK",method="BatchGet"} 1
kvserver_requests_total{code="OK",method="BatchWrite"} 1
kvserver_requests_total{code="OK",method="Bootstrap"} 1
kvserver_requests_total{code="OK",method="BulkLoad"} 1
kvserver_requests_total{code="OK",method="Checkpoint"} 1
kvserver_requests_total{code="OK",method="Clock"} 1
kvserver_requests_total{code="OK",method="Commit"} 1
kvserver_requests_total{code="OK",method="CreateBackup"} 1
kvserver_requests_total{code="OK",method="CreateRole"} 1
kvserver_requests_total{code="OK",method="CreateToken"} 1
kvserver_requests_total{code="OK",method="CreateUser"} 1
kvserver_requests_total{code="OK",method="Delete"} 1
kvserver_requests_total{code="OK",method="DeleteRange"} 1
kvserver_requests_total{code="OK",method="DeleteRole"} 1
kvserver_requests_total{code="OK",method="DeleteUser"} 1
kvserver_requests_total{code="OK",method="Diff"} 1
kvserver_requests_total{code="OK",method="Disable"} 1
kvserver_requests_total{code="OK",method="Enable"} 1
kvserver_requests_total{code="OK",method="EndHold"} 1
kvserver_requests_total{code="OK",method="Execute"} 1
kvserver_requests_total{code="OK",method="Explain"} 1
kvserver_requests_total{code="OK",method="FinalizeUpgrade"} 1
kvserver_requests_total{code="OK",method="Get"} 1
kvserver_requests_total{code="OK",method="GetBackupStatus"} 1
kvserver_requests_total{code="OK",method="GetLease"} 1
kvserver_requests_total{code="OK",method="GetLock"} 1
kvserver_requests_total{code="OK",method="GetOutcome"} 1
kvserver_requests_total{code="OK",method="GetStream"} 1
kvserver_requests_total{code="OK",method="GrantLease"} 1
kvserver_requests_total{code="OK",method="History"} 1
kvserver_requests_total{code="OK",method="Invoke"} 1
kvserver_requests_total{code="OK",method="InvokeAll"} 1
kvserver_requests_total{code="OK",method="KeepAlive"} 1
kvserver_requests_total{code="OK",method="ListBackups"} 1
kvserver_requests_total{code="OK",method="ListHolds"} 1
kvserver_requests_total{code="OK",method="ListLeases"} 1
kvserver_requests_total{code="OK",method="ListLocks"} 1
kvserver_requests_total{code="OK",method="ListRoles"} 1
kvserver_requests_total{code="OK",method="ListTokens"} 1
kvserver_requests_total{code="OK",method="ListUsers"} 1
kvserver_requests_total{code="OK",method="Login"} 1
kvserver_requests_total{code="OK",method="Logout"} 1
kvserver_requests_total{code="OK",method="ObserveLock"} 1
kvserver_requests_total{code="OK",method="Pipeline"} 1
kvserver_requests_total{code="OK",method="PruneBackups"} 1
kvserver_requests_total{code="OK",method="Put"} 1
kvserver_requests_total{code="OK",method="ReleaseLock"} 1
kvserver_requests_total{code="OK",method="ReloadConfig"} 1
kvserver_requests_total{code="OK",method="ReloadTLS"} 1
kvserver_requests_total{code="OK",method="ResizeCache"} 1
kvserver_requests_total{code="OK",method="RevokeLease"} 1
kvserver_requests_total{code="OK",method="RevokeToken"} 1
kvserver_requests_total{code="OK",method="Scan"} 1
kvserver_requests_total{code="OK",method="SetConfig"} 1
kvserver_requests_total{code="OK",method="SetPassword"} 1
kvserver_requests_total{code="OK",method="SlowRequests"} 1
kvserver_requests_total{code="OK",method="Space"} 1
kvserver_requests_total{code="OK",method="Status"} 1
kvserver_requests_total{code="OK",method="TakeHold"} 1
kvserver_requests_total{code="OK",method="Transact"} 1
kvserver_requests_total{code="OK",method="UpdateRole"} 1
kvserver_requests_total{code="OK",method="UpdateUser"} 1
kvserver_requests_total{code="OK",method="Verify"} 1
kvserver_requests_total{code="OK",method="VerifyBackup"} 1
kvserver_requests_total{code="OK",method="Watch"} 1
kvserver_requests_total{code="OK",method="WhoAmI"} 1
kvserver_requests_total{code="Unauthenticated",method="Get"} 1
# HELP kvserver_visible_epoch Epoch that new snapshots read: every commit up to it is visible.
# TYPE kvserver_visible_epoch gauge
kvserver_visible_epoch 7
# HELP kvserver_memtable_keys Keys in all memtables; a key in several memtables counts in each.
# TYPE kvserver_memtable_keys gauge
kvserver_memtable_keys 5
# HELP kvserver_failed 1 after a failed write or sync has stopped the store from accepting writes, else 0.
# TYPE kvserver_failed gauge
kvserver_failed 1
`), "kvserver_requests_total", "kvserver_visible_epoch", "kvserver_memtable_keys", "kvserver_failed")
	if err != nil {
		t.Error(err)
	}
}

func TestDurationsFallIntoTheBucketBelowTheirBound(t *testing.T) {
	for took, bucket := range map[time.Duration]int{
		-1: 0, 0: 0, 4095: 0, 4096: 1, 8191: 1, 8192: 2, 8589934591: 21, 8589934592: 22, time.Hour: 22,
	} {
		var s Shard
		s.Observe(MethodGet, codes.OK, took)
		if n := s.methods[MethodGet].buckets[bucket].Load(); n != 1 {
			t.Errorf("%v is not in bucket %d", took, bucket)
		}
	}
}

func TestObservingAllocatesNothing(t *testing.T) {
	s := new(Requests).Shard()
	if n := testing.AllocsPerRun(100, func() { s.Observe(MethodPut, codes.OK, time.Microsecond) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestLogLinesHaveTheConfiguredShapeAndLevel(t *testing.T) {
	for format, want := range map[config.LogFormat]string{config.LogText: `msg=hello n=1`, config.LogJSON: `"msg":"hello","n":1`} {
		var out bytes.Buffer
		log := NewLogger(&out, slog.LevelInfo, format)
		log.Debug("too fine")
		log.Info("hello", "n", 1)
		if got := out.String(); !strings.Contains(got, want) || strings.Contains(got, "too fine") {
			t.Errorf("%s: %s", format, got)
		}
	}
}

func BenchmarkObserve(b *testing.B) {
	s := new(Requests).Shard()
	for b.Loop() {
		s.Observe(MethodPut, codes.OK, time.Microsecond)
	}
}

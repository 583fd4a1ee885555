package server

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestStuckSyncShowsInHealthAndRecovers holds back a sync of the log, as a device that does not
// answer does. The store knows of no error.
func TestStuckSyncShowsInHealthAndRecovers(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.ProbeInterval, c.ProbeTimeout = 10*time.Millisecond, 200*time.Millisecond })
	status := func() healthpb.HealthCheckResponse_ServingStatus {
		out, err := healthpb.NewHealthClient(h.conn).Check(testContext(t), &healthpb.HealthCheckRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return out.Status
	}
	h.put(t, "k", "v")
	if code, body := httpGet(t, h, "/healthz"); code != http.StatusOK {
		t.Fatalf("a healthy server: %d %s", code, body)
	}
	start := time.Now() // before the first probe that can be held up
	release := h.holdSyncs(t)
	h.put(t, "k", "w") // ASYNC: something for the probe to follow
	eventually(t, "/healthz fails", func() bool { code, _ := httpGet(t, h, "/healthz"); return code == http.StatusServiceUnavailable })
	if took := time.Since(start); took < 200*time.Millisecond {
		t.Errorf("health failed after %v, before the probe's time was up", took)
	}
	eventually(t, "grpc.health.v1 fails", func() bool { return status() == healthpb.HealthCheckResponse_NOT_SERVING })
	if code, _ := httpGet(t, h, "/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("/readyz: %d", code)
	}
	out, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
	if err != nil || out.Health.State != pb.Health_STATE_UNAVAILABLE || len(out.Health.Conditions) != 1 || out.Health.Conditions[0].Name != "probe-failing" {
		t.Errorf("status: %v, %v", out.GetHealth(), err)
	}
	if err := h.store.Err(); err != nil {
		t.Fatalf("the test is about a store that knows of no error: %v", err)
	}
	release()
	eventually(t, "/healthz recovers", func() bool { code, _ := httpGet(t, h, "/healthz"); return code == http.StatusOK })
	eventually(t, "grpc.health.v1 recovers", func() bool { return status() == healthpb.HealthCheckResponse_SERVING })
	h.put(t, "k", "x")
}

func TestProbeLeavesNothingForClientsToSee(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.ProbeInterval = 10 * time.Millisecond })
	before := h.store.Visible()
	h.put(t, "k", "v")
	eventually(t, "some probes", func() bool { return h.store.Visible() > before+3 })
	checkpoint := func() uint64 {
		if _, err := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{}); err != nil {
			t.Fatal(err)
		}
		out, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return out.Tree.Keys
	}
	for range 3 {
		if n := checkpoint(); n != 1 {
			t.Errorf("%d keys", n)
		}
	}
	pages := h.scan(t, &pb.ScanRequest{})
	if len(pages) != 1 || len(pages[0].Entries) != 1 || string(pages[0].Entries[0].Key) != "k" {
		t.Errorf("scan: %v", pages)
	}
}

// TestIdleServerProbesRarely: an idle store rests, so that its disk may.
func TestIdleServerProbesRarely(t *testing.T) {
	const interval = 20 * time.Millisecond
	start := time.Now()
	h := mustStart(t, func(c *config.Config) { c.ProbeInterval = interval })
	eventually(t, "a probe", func() bool { return h.store.Visible() > 0 })
	time.Sleep(20 * interval)
	probes := h.store.Visible() // first, so that time may pass and the bound still hold
	if most := time.Since(start)/(probeIdleEvery*interval) + 1; int64(probes) > int64(most) {
		t.Errorf("%d probes without a request, want at most %d", probes, most)
	}
}

func TestFailedProbeIsACondition(t *testing.T) {
	var p probe
	now := time.Unix(100, 0)
	if got := p.conditions(now, time.Second); got != nil {
		t.Errorf("no probe: %v", got)
	}
	began := now.Add(-time.Second)
	p.started.Store(&began)
	if got := p.conditions(now, time.Second); got != nil {
		t.Errorf("at its time: %v", got)
	}
	if got := p.conditions(now.Add(time.Millisecond), time.Second); len(got) != 1 || !strings.Contains(got[0].Cause, "under way") {
		t.Errorf("past it: %v", got)
	}
	p.started.Store(nil)
	err := errOverloaded
	p.failed.Store(&err)
	if got := p.conditions(now, time.Second); len(got) != 1 || got[0].Cause != err.Error() {
		t.Errorf("failed: %v", got)
	}
}

// holdSyncs holds back every sync of the log until release is called.
func (h *harness) holdSyncs(t *testing.T) (release func()) {
	until := make(chan struct{})
	held := h.faults.Inject(vfs.Rule{Op: vfs.OpSync | vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until})
	release = sync.OnceFunc(func() {
		held.Remove()
		close(until)
	})
	t.Cleanup(release) // before the server is stopped
	return release
}

// TestAProbeThatAStopEndsHasNotSucceeded: nothing says that the device answers.
func TestAProbeThatAStopEndsHasNotSucceeded(t *testing.T) {
	h := mustStart(t)
	until := make(chan struct{})
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpSync | vfs.OpSyncData, Name: "*.log", Fault: vfs.Slow, Until: until})
	release := sync.OnceFunc(func() {
		rule.Remove()
		close(until)
	})
	t.Cleanup(release)
	go putSync(testContext(t), h) // syncs the log, also for the probe
	eventually(t, "it syncs", func() bool { return rule.Fired() > 0 })
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer stop()
	h.probeOnce(ctx)
	if h.conditions.probe.started.Load() == nil {
		t.Error("it is said to have ended well")
	}
	release()
	h.probeOnce(t.Context())
	if h.conditions.probe.started.Load() != nil {
		t.Error("a later one is said to be under way")
	}
}

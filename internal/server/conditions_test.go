package server

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

func TestEachTroubleIsACondition(t *testing.T) {
	healthy := func() mvcc.Stats {
		var s mvcc.Stats
		s.Storage.Disk.Free, s.Storage.Memory.Budget = 10<<30, 1<<30
		return s
	}
	before, fine := healthy(), healthy()
	if found := countedConditions(&before, &fine); len(found) != 0 {
		t.Fatalf("a healthy server has %v", found)
	}
	for name, ail := range map[string]func(s *mvcc.Stats){
		"memory-full":      func(s *mvcc.Stats) { s.Storage.Backpressure.Refused++ },
		"writes-stalled":   func(s *mvcc.Stats) { s.Storage.Backpressure.StallTime++ },
		"disk-low":         func(s *mvcc.Stats) { s.Storage.Disk.Free = 1 << 20 },
		"clock-differs":    func(s *mvcc.Stats) { s.ClockDifference = -6 * time.Second },
		"start-incomplete": func(s *mvcc.Stats) { s.Storage.Damage.Incomplete++ },
		"values-not-freed": func(s *mvcc.Stats) { s.Storage.Blobs.Unfreed++ },
		"old-snapshot":     func(s *mvcc.Stats) { s.Snapshots.OldestAge = time.Hour },
	} {
		now := healthy()
		ail(&now)
		if found := countedConditions(&before, &now); len(found) != 1 || found[0].Name != name {
			t.Errorf("%s: %v", name, found)
		}
	}
	found := errorConditions(errors.New("log"), nil, errors.New("disk"), errors.New("page 7"))
	if len(found) != 3 || found[0].Severity != health.Unavailable || found[1].Severity != health.Degraded || found[2].Cause != "page 7" {
		t.Errorf("errors of the store: %v", found)
	}
	if found := errorConditions(nil, nil, nil, nil); len(found) != 0 {
		t.Errorf("a healthy store has %v", found)
	}
}

// TestConditionShowsEverywhere fails a checkpoint and looks at every place that tells of health.
func TestConditionShowsEverywhere(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.CheckpointInterval = time.Second })
	full := h.faults.Inject(vfs.Rule{Op: vfs.OpPreallocate | vfs.OpWrite, Name: "data.ekv", Err: vfs.ErrNoSpace})
	defer full.Remove()
	h.put(t, "k", "v")
	eventually(t, "the condition shows", func() bool { return len(h.observe()) > 1 })
	status, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	c := status.Health.Conditions
	if len(c) != 2 {
		t.Fatalf("status: %v", status.Health)
	}
	for i, name := range []string{"checkpoints-failing", "disk-full"} {
		if c[i].Name != name || c[i].Severity != pb.Condition_SEVERITY_DEGRADED || c[i].Since == nil || c[i].Cause == "" {
			t.Errorf("status: %v", status.Health)
		}
		if code, body := httpGet(t, h, "/healthz"); code != http.StatusOK || !strings.HasPrefix(body, "ok\n") || !strings.Contains(body, "\ndegraded: "+name+": ") {
			t.Errorf("/healthz: %d %q", code, body)
		}
		if _, body := httpGet(t, h, "/metrics"); !strings.Contains(body, `kvserver_condition{name="`+name+`",severity="degraded"} 1`) {
			t.Errorf("/metrics does not show %s", name)
		}
	}
}

// TestAFullDiskIsLoggedShownAndOver fills the disk, and makes room again.
func TestAFullDiskIsLoggedShownAndOver(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.CheckpointInterval = time.Second })
	full := h.faults.Inject(vfs.Rule{Op: vfs.OpPreallocate | vfs.OpWrite, Name: "data.ekv", Err: vfs.ErrNoSpace})
	eventually := func(what string, ok func() bool) {
		t.Helper()
		for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s; the log says:\n%s", what, h.log.String())
			}
		}
	}
	cause := func() string {
		out, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return out.Health.Cause
	}
	h.put(t, "k", strings.Repeat("v", 10_000))
	eventually("the refusal is not logged", func() bool { return strings.Contains(h.log.String(), "the disk is full: writes are refused") })
	eventually("the failing checkpoint is not logged", func() bool { return strings.Contains(h.log.String(), "checkpoints fail") })
	if !strings.Contains(cause(), "no space") {
		t.Errorf("status says %q", cause())
	}
	full.Remove()
	eventually("its end is not logged", func() bool { return strings.Contains(h.log.String(), "ended: checkpoints fail") })
	eventually("the end of the refusal is not logged", func() bool { return strings.Contains(h.log.String(), "ended: the disk is full") })
	if cause() != "" {
		t.Errorf("status still says %q", cause())
	}
}

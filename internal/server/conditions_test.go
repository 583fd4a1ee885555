package server

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	pb "epochkv/api/proto/epochkv/v1"
	"epochkv/internal/config"
	"epochkv/internal/mvcc"
	"epochkv/internal/vfs"
)

func TestAConditionIsToldWhenItBeginsNowAndThenAndWhenItIsOver(t *testing.T) {
	var out logBuffer
	c := conditionLog{log: slog.New(slog.NewTextHandler(&out, nil)), lasts: map[string]*lasting{}}
	at := time.Unix(1000, 0)
	here := []condition{{slog.LevelWarn, "it rains", []any{"inches", 3}}}
	lines := func() int { return strings.Count(out.String(), "it rains") }
	for range 100 { // a hundred seconds
		c.update(at, here)
		at = at.Add(time.Second)
	}
	if lines() != 1 || !strings.Contains(out.String(), "level=WARN") || !strings.Contains(out.String(), "inches=3") {
		t.Fatalf("after its beginning: %s", out.String())
	}
	for range int(conditionRepeat / time.Second) {
		c.update(at, here)
		at = at.Add(time.Second)
	}
	if lines() != 2 {
		t.Fatalf("after it went on for %v: %s", conditionRepeat, out.String())
	}
	c.update(at, nil)
	c.update(at.Add(time.Second), nil)
	if lines() != 3 || !strings.Contains(out.String(), "over: it rains") || !strings.Contains(out.String(), "lasted=11m40s") {
		t.Fatalf("after its end: %s", out.String())
	}
}

func TestEachTroubleIsACondition(t *testing.T) {
	healthy := func() mvcc.Stats {
		var s mvcc.Stats
		s.Storage.DiskFree, s.Storage.MemoryBudget = 10<<30, 1<<30
		return s
	}
	before, fine := healthy(), healthy()
	if found := conditionsOf(&before, &fine, nil); len(found) != 0 {
		t.Fatalf("a healthy server has %v", found)
	}
	for words, ail := range map[string]func(s *mvcc.Stats){
		"checkpoints fail": func(s *mvcc.Stats) { s.CheckpointErr = errors.New("disk") },
		"refused":          func(s *mvcc.Stats) { s.Storage.Refused++ },
		"wait":             func(s *mvcc.Stats) { s.Storage.StallTime++ },
		"nearly full":      func(s *mvcc.Stats) { s.Storage.DiskFree = 1 << 20 },
		"old snapshot":     func(s *mvcc.Stats) { s.Snapshots.OldestAge = time.Hour },
	} {
		now := healthy()
		ail(&now)
		found := conditionsOf(&before, &now, nil)
		if len(found) != 1 || !strings.Contains(found[0].what, words) {
			t.Errorf("%s: %v", words, found)
		}
	}
	if found := conditionsOf(&before, &fine, errors.New("page 7")); len(found) != 1 || found[0].level != slog.LevelError {
		t.Errorf("damage: %v", found)
	}
}

// TestAFullDiskIsLoggedShownAndForgotten fills the disk, and makes room again.
func TestAFullDiskIsLoggedShownAndForgotten(t *testing.T) {
	h := mustStart(t, func(c *config.Config) { c.CheckpointInterval = time.Second })
	full := h.faults.Inject(vfs.Rule{Op: vfs.OpPreallocate, Name: "data.ekv", Err: vfs.ErrNoSpace})
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
	for i := range 50 {
		h.put(t, string(rune('a'+i%26)), strings.Repeat("v", 10_000))
	}
	eventually("the failing checkpoint is not logged", func() bool { return strings.Contains(h.log.String(), "checkpoints fail") })
	if !strings.Contains(cause(), "no space") {
		t.Errorf("status says %q", cause())
	}
	full.Remove()
	eventually("its end is not logged", func() bool { return strings.Contains(h.log.String(), "over: checkpoints fail") })
	if cause() != "" {
		t.Errorf("status still says %q", cause())
	}
}

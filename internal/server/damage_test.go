package server

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
)

// TestWritesGoOnDespiteADamagedPageAndItIsReported: what is written to its keys is read, the
// others stay lost, checkpoints are made, and log, status and metrics say what is the matter.
func TestWritesGoOnDespiteADamagedPageAndItIsReported(t *testing.T) {
	h := mustStartDamaged(t)
	for i := 0; i < 3000; i += 2 {
		h.put(t, fmt.Sprintf("key-%05d", i), "new")
	}
	if _, err := h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{}); err != nil {
		t.Fatalf("checkpoint: %v", err)
	}
	lost := 0
	for i := range 3000 {
		got, err := h.kv.Get(testContext(t), &pb.GetRequest{Key: fmt.Appendf(nil, "key-%05d", i)})
		switch {
		case err != nil && i%2 == 1:
			lost++
			failureOf(t, err).want(t, codes.DataLoss, pb.ErrorReason_ERROR_REASON_CORRUPTION, h.damageFields()...)
		case err != nil || !got.Found || i%2 == 0 && string(got.Value) != "new":
			t.Fatalf("key %d: %v, %v", i, got, err)
		}
	}
	if lost == 0 || lost > 100 {
		t.Errorf("%d keys are lost", lost)
	}
	status, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
	if err != nil || status.Health.State != pb.Health_STATE_SERVING || !strings.Contains(status.Health.Cause, "data.ekv is damaged") ||
		!strings.Contains(status.Health.Cause, "salvage") {
		t.Errorf("health: %v, %v", status.GetHealth(), err)
	}
	if _, metrics := httpGet(t, h, "/metrics"); !strings.Contains(metrics, "\nkvserver_skipped_pages 1\n") {
		t.Error("metrics do not say so")
	}
	eventually(t, "the log says so", func() bool { return strings.Contains(h.log.String(), "checkpoints have met damage") })
	space, err := h.admin.Space(testContext(t), &pb.SpaceRequest{ByPrefix: true})
	if err != nil || space.UnreadableTotal != 1 || len(space.Unreadable) != 1 || len(space.Unreadable[0].KeyLower) == 0 {
		t.Errorf("space: %v, %v", space, err)
	}
	keys := space.GetOtherPrefixes().GetKeys()
	for _, p := range space.GetPrefixes() {
		keys += p.Keys
	}
	if keys != uint64(3000-lost) {
		t.Errorf("space counts %d keys of 3000, %d of which are lost", keys, lost)
	}
	if report := h.verify(t); report.DamageTotal != 1 || len(report.Notes) != 1 {
		t.Errorf("report: %v", report)
	}
}

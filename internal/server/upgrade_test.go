package server

import (
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
)

// TestStatusNamesTheHistory: a new store has a lineage and the newest feature level, which finalizing does not change.
func TestStatusNamesTheHistory(t *testing.T) {
	h := mustStart(t)
	status, err := h.admin.Status(testContext(t), &pb.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	history := status.GetHistory()
	if len(history.GetLineage()) != 16 || history.GetFeatureLevel() != uint32(keys.FeatureLevelNewest) || history.GetFeatureLevelNewest() != history.GetFeatureLevel() {
		t.Fatalf("%v", history)
	}
	done, err := h.admin.FinalizeUpgrade(testContext(t), &pb.FinalizeUpgradeRequest{})
	if err != nil || done.GetFeatureLevel() != history.GetFeatureLevel() || done.GetPreviousLevel() != history.GetFeatureLevel() {
		t.Fatal(done, err)
	}
}

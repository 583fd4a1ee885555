package server

import (
	"bytes"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestValuesAboveTheLimitsOfNowAreAnswered: what was written before the limits of requests were lowered, and a value beside the one that it has
// replaced, may be more than a message to the server. All that reads them answers nevertheless: a watch would never get past them.
func TestValuesAboveTheLimitsOfNowAreAnswered(t *testing.T) {
	disk, value := vfs.NewMem(), bytes.Repeat([]byte("v"), 1200<<10)
	before := mustStartOn(t, disk)
	first := before.put(t, "k", string(value))
	second := before.put(t, "k", string(value[1:]))
	if err := before.stop(); err != nil {
		t.Fatal(err)
	}
	h := mustStartOn(t, disk, func(c *config.Config) {
		c.Limits.ValueSize, c.Limits.BatchSize, c.Limits.BatchOps = 64*config.KiB, 64*config.KiB, 1
	})
	if most := messageBytesMax(&h.config); most >= len(value)-1 {
		t.Fatalf("messages to the server have up to %d bytes", most)
	}
	ctx, feed, key := testContext(t), pb.NewFeedServiceClient(h.conn), []byte("k")
	page, err := h.scanOnce(t, new(pb.ScanRequest))
	if err != nil || len(page.Entries) != 1 || !bytes.Equal(page.Entries[0].Value, value[1:]) {
		t.Errorf("scan: %v", err)
	}
	history, err := feed.History(ctx, &pb.HistoryRequest{Key: key})
	if err != nil || len(history.Versions) == 0 || !bytes.Equal(history.Versions[len(history.Versions)-1].Value, value[1:]) {
		t.Errorf("history: %v", err)
	}
	get := &pb.TransactRequest{Request: &pb.TransactRequest_Get{Get: &pb.KeyReadRequest{Key: key}}}
	if err := inTransaction(ctx, pb.NewTransactionServiceClient(h.conn), get); err != nil {
		t.Errorf("get in a transaction: %v", err)
	}
	w := mustWatch(t, h, &pb.CreateWatch{WatchId: 1, Start: &pb.CreateWatch_AfterEpoch{AfterEpoch: first - 1}, Values: pb.WatchValues_WATCH_VALUES_NEW_AND_PREVIOUS})
	for epoch := uint64(0); epoch < second; {
		for _, c := range w.recv().GetChanges().GetCommits() {
			for _, e := range c.Events {
				if want := value[c.Epoch-first:]; !bytes.Equal(e.Value, want) {
					t.Errorf("watch: a value of %d bytes, want %d", len(e.Value), len(want))
				}
			}
			epoch = c.Epoch
		}
	}
}

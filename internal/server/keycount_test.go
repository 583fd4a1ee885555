package server

import (
	"fmt"
	"testing"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestStatusCountsTheKeysOfClients: the store's own records, of requests, deadlines and the past, are not counted, also
// after a restart, a crash and a bulk load.
func TestStatusCountsTheKeysOfClients(t *testing.T) {
	h := mustStart(t)
	want := uint64(0)
	count := func(when string) {
		t.Helper()
		ctx := testContext(t)
		if _, err := h.admin.Checkpoint(ctx, &pb.CheckpointRequest{}); err != nil {
			t.Fatal(err)
		}
		status, err := h.admin.Status(ctx, &pb.StatusRequest{})
		if err != nil || status.Tree.Keys != want {
			t.Fatalf("%s: %d keys, want %d: %v", when, status.GetTree().GetKeys(), want, err)
		}
		space, err := h.admin.Space(ctx, &pb.SpaceRequest{})
		if err != nil || space.Keys != want {
			t.Fatalf("%s: space says %d keys, want %d: %v", when, space.GetKeys(), want, err)
		}
		if tree := h.store.Stats().Storage.Tree; tree.Entries <= tree.UserKeys {
			t.Fatalf("%s: there are no records of the store: the test tests nothing", when)
		}
	}
	write := func() {
		t.Helper()
		for range 20 {
			req := &pb.PutRequest{Key: fmt.Append(nil, "key", want), Value: []byte("value"), RequestId: newRequestID(t), TtlMs: 3_600_000}
			if _, err := h.kv.Put(testContext(t), req); err != nil {
				t.Fatal(err)
			}
			want++
		}
		if _, err := h.kv.Delete(testContext(t), &pb.DeleteRequest{Key: fmt.Append(nil, "key", want-1), RequestId: newRequestID(t)}); err != nil {
			t.Fatal(err)
		}
		want--
	}
	write()
	count("after writes")
	write()
	if err := h.stop(); err != nil {
		t.Fatal(err)
	}
	h = mustStartOn(t, h.disk)
	count("after a restart")
	write()
	h = mustStartOn(t, h.disk.Crash(1, vfs.SurviveAll))
	count("after a crash")
	if _, err := h.bulk(t, 1000, 100, true); err != nil {
		t.Fatal(err)
	}
	want += 1000
	write()
	count("after a bulk load")
}

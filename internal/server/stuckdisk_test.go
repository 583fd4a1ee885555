package server

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/health"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestStuckLogFilesEndNoReadAndNoServer: one operation on log files does not return, for each that
// the log needs. The server gives up requests at their deadlines, answers reads, says that it is
// not healthy if writes are held up, and is as before when the operation has returned.
func TestStuckLogFilesEndNoReadAndNoServer(t *testing.T) {
	t.Parallel() // it waits for a device
	for name, c := range map[string]struct {
		op      vfs.Op
		name    string
		holds   bool // writes, in the end
		inside  int  // requests that may be in the operation
		recycle bool // it concerns files that a checkpoint has freed
	}{
		"sync":               {vfs.OpSyncData, "*.log", true, 1, false}, // of the one that flushes for all
		"write":              {vfs.OpWrite, "*.log", true, 1, false},
		"create":             {vfs.OpCreate, "*.log", true, 0, false},
		"rename when freed":  {vfs.OpRename, "*.log", false, 1, true}, // the checkpoint
		"rename when reused": {vfs.OpRename, "reserve-*", true, 0, true},
		"remove":             {vfs.OpRemove, "*.log", false, 1, true},
	} {
		t.Run(name, func(t *testing.T) {
			h := mustStart(t, func(c *config.Config) {
				c.ProbeInterval, c.ProbeTimeout = 10*time.Millisecond, 200*time.Millisecond
				c.Feed.Retention = 0 // so that checkpoints free log files
			})
			h.put(t, "k", "v")
			until := make(chan struct{})
			rule := h.faults.Inject(vfs.Rule{Op: c.op, Name: c.name, Fault: vfs.Slow, Until: until})
			release := sync.OnceFunc(func() {
				rule.Remove()
				close(until)
			})
			t.Cleanup(release) // before the server is stopped
			var beside sync.WaitGroup
			defer beside.Wait()
			if c.recycle {
				rule.Remove()
				for range 80 {
					h.put(t, "k", strings.Repeat("v", 100<<10))
				}
				rule = h.faults.Inject(vfs.Rule{Op: c.op, Name: c.name, Fault: vfs.Slow, Until: until})
				beside.Go(func() { _, _ = h.admin.Checkpoint(testContext(t), &pb.CheckpointRequest{}) })
				eventually(t, "the operation is met", func() bool {
					h.put(t, "k", strings.Repeat("v", 100<<10))
					return rule.Fired() > 0
				})
			}
			late := 0
			write := func(d pb.Durability) {
				ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("w"), Value: make([]byte, 100<<10), Durability: d})
				switch status.Code(err) {
				case codes.OK:
				case codes.DeadlineExceeded:
					late++
				default:
					t.Fatal(err)
				}
			}
			for i := 0; (i < 100 || c.holds) && (late < 3 || c.holds && rule.Fired() == 0) && i < 2000; i++ { // on a busy machine some are late before
				write([]pb.Durability{pb.Durability_DURABILITY_SYNC, pb.Durability_DURABILITY_ASYNC}[i%2])
			}
			if c.holds && (late < 3 || rule.Fired() == 0) {
				t.Errorf("%d writes were late, and the fault met %d times: this tests nothing", late, rule.Fired())
			}
			eventually(t, "late requests leave the server", func() bool {
				requests, _, _ := h.admission.inflight()
				return requests <= c.inside
			})
			if len(h.get(t, "k").GetValue()) == 0 {
				t.Error("a read beside it found nothing")
			}
			if c.holds {
				eventually(t, "/healthz fails", func() bool {
					write(pb.Durability_DURABILITY_ASYNC) // there may be room in the log yet
					code, _ := httpGet(t, h, "/healthz")
					return code == http.StatusServiceUnavailable
				})
			}
			release()
			eventually(t, "/healthz recovers", func() bool { code, _ := httpGet(t, h, "/healthz"); return code == http.StatusOK })
			if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: []byte("w"), Durability: pb.Durability_DURABILITY_SYNC}); err != nil {
				t.Error(err)
			}
			beside.Wait()
			if err := h.stop(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestNoDescriptorsForTheNextSegmentIsOverload: no file can be made, as when the descriptors are
// used up. A writer that has waited its time is told to try again, and everything goes on when
// there are descriptors again.
func TestNoDescriptorsForTheNextSegmentIsOverload(t *testing.T) {
	t.Parallel() // it waits for the engine to lose patience
	h := mustStart(t)
	h.put(t, "k", "v")
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpCreate | vfs.OpOpen, Name: "*.log", Err: syscall.EMFILE})
	var err error
	for i := 0; i < 200 && err == nil; i++ {
		_, err = h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 100<<10), Durability: pb.Durability_DURABILITY_ASYNC})
	}
	if err == nil {
		t.Fatal("no write needed a segment")
	}
	f := failureOf(t, err)
	f.want(t, codes.ResourceExhausted, pb.ErrorReason_ERROR_REASON_OVERLOADED, "cause")
	if f.retry == 0 || !strings.Contains(f.metadata["cause"], syscall.EMFILE.Error()) {
		t.Errorf("the client is told %+v", f)
	}
	found := h.observe()
	if i := slices.IndexFunc(found, func(c health.Condition) bool { return c.Name == "log-segment" }); i < 0 || !strings.Contains(found[i].Cause, syscall.EMFILE.Error()) {
		t.Errorf("conditions: %s", fmt.Sprint(found))
	}
	if err := h.store.Err(); err != nil {
		t.Errorf("the store has failed: %v", err)
	}
	h.get(t, "k")
	rule.Remove()
	if _, err := h.kv.Put(testContext(t), &pb.PutRequest{Key: []byte("k"), Value: []byte("w"), Durability: pb.Durability_DURABILITY_SYNC}); err != nil {
		t.Error(err)
	}
	eventually(t, "the condition ends", func() bool {
		return !slices.ContainsFunc(h.observe(), func(c health.Condition) bool { return c.Name == "log-segment" })
	})
}

package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestServerStopsWithAStuckDevice: one operation of the device does not return, before or during
// shutdown. The server ends all the same, within its timeouts, with an error and a log line that
// says what may be lost. Metrics and health answer until then, and what is under way in memory
// ends.
func TestServerStopsWithAStuckDevice(t *testing.T) {
	t.Parallel() // it waits for servers that stop
	for name, c := range map[string]struct {
		op      vfs.Op
		name    string
		nth     int
		request func(context.Context, *harness) // that meets the operation
	}{
		"log sync":  {op: vfs.OpSyncData, name: "*.log", request: putSync},
		"log write": {op: vfs.OpWrite, name: "*.log", request: putSync},
		"creation of a segment": {op: vfs.OpCreate, name: "*.log", request: func(ctx context.Context, h *harness) {
			for range 200 {
				_, _ = h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: make([]byte, 100<<10), Durability: pb.Durability_DURABILITY_ASYNC})
			}
		}},
		"data-file read": {op: vfs.OpRead, name: "data.ekv", request: func(ctx context.Context, h *harness) {
			_, _ = h.kv.Get(ctx, &pb.GetRequest{Key: []byte("cold")})
		}},
		"data-file write":        {op: vfs.OpWrite, name: "data.ekv", request: checkpoint},
		"data-file sync":         {op: vfs.OpSync | vfs.OpSyncData, name: "data.ekv", request: checkpoint},
		"sync of the superblock": {op: vfs.OpSync | vfs.OpSyncData, name: "data.ekv", nth: 2, request: checkpoint},
	} {
		t.Run(name, func(t *testing.T) {
			disk := vfs.NewMem()
			first := mustStartOn(t, disk)
			first.put(t, "cold", "value")
			if err := first.stop(); err != nil {
				t.Fatal(err)
			}
			h := mustStartOn(t, disk, func(c *config.Config) { c.DrainTimeout, c.CloseTimeout = patience, 500*time.Millisecond })
			h.mayStick = true
			cutOff := make(chan struct{})
			h.drain.cutOff = cutOff // what the drain timeout does, at a moment that the test chooses
			h.mustOpenHealthStream(t)
			h.put(t, "warm", "value")
			until := make(chan struct{})
			release := sync.OnceFunc(func() { close(until) })
			t.Cleanup(release)
			rule := h.faults.Inject(vfs.Rule{Op: c.op, Name: c.name, Nth: c.nth, Sticky: true, Fault: vfs.Slow, Until: until})
			var beside sync.WaitGroup
			ctx, cancel := context.WithCancel(t.Context())
			defer beside.Wait()
			defer cancel()
			beside.Go(func() { c.request(ctx, h) })
			eventually(t, "the operation is met", func() bool { return rule.Fired() > 0 })
			if got := string(h.get(t, "warm").GetValue()); got != "value" {
				t.Errorf("a read beside it finds %q", got)
			}
			ended := make(chan error, 1)
			go func() { ended <- h.stop() }()
			eventually(t, "it drains", func() bool { return h.drain.active.Load() })
			if _, body := httpGet(t, h, "/metrics"); !strings.Contains(body, "kvserver_draining 1") {
				t.Error("the metrics do not say that the server drains")
			}
			close(cutOff)
			var stuck *mvcc.StuckError
			select {
			case err := <-ended:
				if !errors.As(err, &stuck) {
					t.Fatalf("ended with %v; the fault was met %d times", err, rule.Fired())
				}
			case <-time.After(patience):
				t.Fatal("shutdown waits for the device")
			}
			if want := fmt.Sprintf("durable_epoch=%d visible_epoch=%d", stuck.Durable, stuck.Visible); !strings.Contains(h.log.String(), want) {
				t.Errorf("the log does not say %s:\n%s", want, h.log)
			}
			release() // for the test alone: the process would have ended
			beside.Wait()
			eventually(t, "everything ends", h.store.Closed)
		})
	}
}

func checkpoint(ctx context.Context, h *harness) {
	_, _ = h.admin.Checkpoint(ctx, &pb.CheckpointRequest{})
}

func putSync(ctx context.Context, h *harness) {
	_, _ = h.kv.Put(ctx, &pb.PutRequest{Key: []byte("k"), Value: []byte("v"), Durability: pb.Durability_DURABILITY_SYNC})
}

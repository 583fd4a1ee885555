package server

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var stuckStep = flag.Int("stuck.step", 19, "TestServerStopsWithStuckWork holds one of so many operations")

// stuckWork is what is at work when the device stops answering.
var stuckWork = map[string]func(ctx context.Context, h *harness){
	"page moves": func(ctx context.Context, h *harness) {
		for range 6 {
			checkpoint(ctx, h)
			_, _ = h.kv.Put(ctx, &pb.PutRequest{Key: []byte("more"), Value: []byte("value")})
		}
	},
	"bulk load": func(ctx context.Context, h *harness) {
		stream, err := h.kv.BulkLoad(ctx)
		if err != nil {
			return
		}
		req := &pb.BulkLoadRequest{Commit: true}
		for i := range 200 {
			req.Entries = append(req.Entries, &pb.BulkEntry{Key: fmt.Appendf(nil, "k%03d", i*3), Value: make([]byte, 100+i%10*2000)})
		}
		_ = stream.Send(req) // CloseAndRecv returns the error
		_, _ = stream.CloseAndRecv()
	},
}

// TestServerStopsWithStuckWork: an operation of the data file, or of the files that a bulk load sorts in, does not return, and
// none after it, while checkpoints move pages, or while a bulk load is sorted, built and published. Health says whether
// writes are held up; the server ends all the same, with an error that says what may be lost; and what was acknowledged is
// there at the next start, with all of the load or nothing of it. With -stuck.step 1 it holds every operation.
func TestServerStopsWithStuckWork(t *testing.T) {
	t.Parallel() // it waits for servers that stop
	disk := vfs.NewMem()
	first := mustStartOn(t, disk, func(c *config.Config) { c.DiskReserve = 0 })
	for part := range 5 {
		for i := range 100 {
			first.put(t, fmt.Sprintf("k%03d", part*100+i), strings.Repeat("v", 100+i%7*3000))
		}
		checkpoint(testContext(t), first)
	}
	for i := range 500 {
		if i%10 != 3 {
			if _, err := first.kv.Delete(testContext(t), &pb.DeleteRequest{Key: fmt.Appendf(nil, "k%03d", i)}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	prepared := disk.Crash(0, vfs.SurviveAll)
	for name, work := range stuckWork {
		for _, files := range []string{"*.ekv", "bulk-*"} {
			t.Run(name+"/"+files, func(t *testing.T) {
				t.Parallel()
				stuck, heldUp := 0, 0
				for nth := 1; ; nth += *stuckStep * (1 + 2*testseed.RaceDetector) {
					met, isStuck, holds := stopWithStuckWork(t, prepared.Crash(uint64(nth), vfs.SurviveAll), files, nth, work)
					if !met {
						break
					}
					stuck, heldUp = stuck+boolToInt(isStuck), heldUp+boolToInt(holds)
				}
				t.Logf("%d servers ended before the device answered; in %d cases writes were held up", stuck, heldUp)
				if strings.HasPrefix(files, "*") && stuck == 0 {
					t.Error("no server had to give up: this tests nothing")
				}
			})
		}
	}
}

func boolToInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// stopWithStuckWork holds an operation, and reports whether there was one, whether the server gave up waiting for it, and whether
// writes were held up.
func stopWithStuckWork(t *testing.T, disk *vfs.Mem, files string, nth int, work func(context.Context, *harness)) (met, stuck, heldUp bool) {
	h := mustStartOn(t, disk, func(c *config.Config) {
		c.DrainTimeout, c.CloseTimeout = 100*time.Millisecond, 500*time.Millisecond
		c.ProbeInterval, c.ProbeTimeout = 10*time.Millisecond, 100*time.Millisecond
	})
	h.mayStick = true
	h.put(t, "last", "value")
	until := make(chan struct{})
	release := sync.OnceFunc(func() { close(until) })
	t.Cleanup(release)
	rule := h.faults.Inject(vfs.Rule{Op: vfs.OpMutating, Name: files, Nth: nth, Sticky: true, Fault: vfs.Slow, Until: until})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		work(ctx, h)
	}()
	eventually(t, "the operation is met, or there is none", func() bool {
		select {
		case <-done:
			return true
		default:
			return rule.Fired() > 0
		}
	})
	if met = rule.Fired() > 0; met {
		heldUp = beside(t, h)
	}
	ended := make(chan error, 1)
	go func() { ended <- h.stop() }()
	select {
	case err := <-ended:
		if stuck = errors.As(err, new(*mvcc.StuckError)); err != nil && !stuck {
			t.Fatalf("operation %d: the server ended with %v", nth, err)
		}
	case <-time.After(time.Minute):
		t.Fatalf("operation %d: shutdown waits for the device", nth)
	}
	left := disk.Crash(uint64(nth), vfs.SurviveSome) // the process has ended
	release()
	<-done
	eventually(t, "everything ends", h.store.Closed)
	again := mustStartOn(t, left)
	if got := string(again.get(t, "last").GetValue()); got != "value" {
		t.Errorf("operation %d: the next start finds %q", nth, got)
	}
	loaded := 0
	for i := range 200 {
		if v := again.get(t, fmt.Sprintf("k%03d", i*3)).GetValue(); len(v) > 0 && v[0] == 0 {
			loaded++
		}
	}
	if loaded != 0 && loaded != 200 {
		t.Errorf("operation %d: the next start finds %d of 200 keys of the bulk load", nth, loaded)
	}
	if err := again.stop(); err != nil {
		t.Error(err)
	}
	return met, stuck, heldUp
}

// beside checks what is served while the device does not answer: reads, and health, which fails exactly if a write is held up.
// It reports whether one is.
func beside(t *testing.T, h *harness) (heldUp bool) {
	t.Helper()
	if got := string(h.get(t, "last").GetValue()); got != "value" {
		t.Errorf("a read beside it finds %q", got)
	}
	put := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte("beside"), Value: []byte("value"), Durability: pb.Durability_DURABILITY_SYNC})
		return err
	}
	if heldUp = put() != nil; heldUp {
		eventually(t, "/healthz fails, or the write was only late", func() bool { // as on a busy machine
			if code, _ := httpGet(t, h, "/healthz"); code == http.StatusServiceUnavailable {
				return true
			}
			heldUp = put() != nil
			return !heldUp
		})
	}
	if !heldUp {
		eventually(t, "/healthz is good", func() bool { code, _ := httpGet(t, h, "/healthz"); return code == http.StatusOK }) // a probe may be late, too
	}
	return heldUp
}

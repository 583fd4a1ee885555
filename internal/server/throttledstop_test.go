package server

import (
	"context"
	"flag"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/config"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

var throttledFor = flag.Duration("throttled.for", 0, "how long TestServerStopsInEachStateOfTheThrottle stops servers in each state; once by default")

// TestServerStopsInEachStateOfTheThrottle: writers that are not delayed, that are delayed because merges are slow, and that are stopped
// because memory is full and the merge does not go on, end when the server stops: all of them before the merge does. What was
// acknowledged is there afterwards.
func TestServerStopsInEachStateOfTheThrottle(t *testing.T) {
	testseed.SkipUnderRace(t)
	t.Parallel() // it waits for servers that stop
	for name, c := range map[string]struct {
		slow    time.Duration // of each write of the data file
		stuck   bool          // writes of the data file do not return
		reached func(storage.BackpressureStats) bool
	}{
		"free":    {reached: func(storage.BackpressureStats) bool { return true }},
		"delayed": {slow: 5 * time.Millisecond, reached: func(s storage.BackpressureStats) bool { return s.DelayPerKiB > 0 }},
		"stopped": {stuck: true, reached: func(s storage.BackpressureStats) bool { return s.Stalls > 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			for began, first := time.Now(), true; first || time.Since(began) < *throttledFor && !t.Failed(); first = false {
				disk := vfs.NewMem()
				h := mustStartOn(t, disk, func(c *config.Config) {
					c.Memory, c.MemtableSize, c.DrainTimeout = 64*config.MiB, config.MiB, 500*time.Millisecond
				})
				rule := vfs.Rule{Op: vfs.OpWrite, Name: "data.ekv", Fault: vfs.Slow, Delay: c.slow}
				until := make(chan struct{})
				release := sync.OnceFunc(func() { close(until) })
				if c.stuck {
					rule.Until = until
				}
				injected := h.faults.Inject(rule)
				w, slower := overwriters(h, 16), time.Now()
				eventually(t, "writers are "+name, func() bool {
					if c.slow > 0 && time.Since(slower) > 2*time.Second { // on a busy machine writers are slow, too
						injected.Remove()
						rule.Delay, slower = 2*rule.Delay, time.Now()
						injected = h.faults.Inject(rule)
					}
					return w.acknowledged() > 16 && c.reached(h.store.Stats().Storage.Backpressure)
				})
				ended := make(chan error, 1)
				go func() { ended <- h.stop() }()
				w.done.Wait() // the merge does not proceed
				injected.Remove()
				release()
				if err := <-ended; err != nil {
					t.Errorf("the server ended with %v", err)
				}
				w.check(t, mustStartOn(t, disk))
			}
		})
	}
}

// overwriting is writers that put numbers, each at keys of its own, until the server says that it stops.
type overwriting struct {
	done sync.WaitGroup
	mu   sync.Mutex
	last map[string]int // that was acknowledged, by key
}

func overwriters(h *harness, n int) *overwriting {
	w := &overwriting{last: map[string]int{}}
	padding := strings.Repeat(".", 32<<10) // on a busy machine a few hundred a second have to fill memory
	for i := range n {
		w.done.Go(func() {
			for number := 1; ; number++ {
				key := fmt.Sprintf("%d-%d", i, number%20)
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				_, err := h.kv.Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte(strconv.Itoa(number) + padding), Durability: pb.Durability_DURABILITY_SYNC})
				cancel()
				switch status.Code(err) {
				case codes.OK:
					w.mu.Lock()
					w.last[key] = number
					w.mu.Unlock()
				case codes.ResourceExhausted: // memory is full
				default:
					return
				}
			}
		})
	}
	return w
}

// acknowledged counts the keys with an acknowledged number.
func (w *overwriting) acknowledged() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.last)
}

// check finds every number that was acknowledged, or a later one of its writer.
func (w *overwriting) check(t *testing.T, h *harness) {
	t.Helper()
	for key, want := range w.last {
		number, _, _ := strings.Cut(string(h.get(t, key).GetValue()), ".")
		if got, err := strconv.Atoi(number); err != nil || got < want {
			t.Errorf("%s: %q, want at least %d", key, number, want)
		}
	}
	if err := h.stop(); err != nil {
		t.Error(err)
	}
}

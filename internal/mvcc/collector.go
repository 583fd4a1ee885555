package mvcc

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/pin"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// pruneEvery bounds how often long chains make the collector refresh the GC watermarks between the
// ticks of its timer. At four million overwrites of one key a second, a millisecond is 4000
// versions.
const pruneEvery = time.Millisecond

// collector recomputes min-visible on a timer and prunes the long chains that writers have queued.
// It is one goroutine, and idle between ticks. If the scheduler does not run it, a writer that has
// made a chain of backpressureLength versions does its work once, after the writer's own commit.
type collector struct {
	store *Store

	mu   sync.Mutex // guards what follows
	slot *pin.Slot
	live []keys.Epoch

	collections, collectNanos atomic.Uint64
}

func newCollector(s *Store) *collector {
	return &collector{store: s, slot: s.registry.Slot()}
}

func (c *collector) run(ctx context.Context) {
	defer c.slot.Free()
	tick := time.NewTicker(c.store.options.GCInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			c.collect(nil, true)
			c.store.engine.Reclaim()
		case q := <-c.store.engine.PruneRequests():
			c.collect(&q, false)
			time.Sleep(pruneEvery) // Stop waits for it: a millisecond
		}
	}
}

// collect publishes a new low watermark and min-visible, and prunes the queued chains. On the ticks
// of the timer it also prunes chains that earlier runs could not shorten enough.
func (c *collector) collect(first *storage.PruneRequest, again bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.collectLocked(first, again)
}

func (c *collector) collectLocked(first *storage.PruneRequest, again bool) {
	start := time.Now()
	c.refresh(start)
	h := memtable.GCWatermarks{MinVisible: c.live[0], LowWatermark: c.live[len(c.live)-1]}
	if len(c.live) > 1 { // without a snapshot below the low watermark there is no interior
		h.Snapshots = c.live
	}
	c.store.engine.Prune(c.slot, first, h, again)
	c.collections.Add(1)
	c.collectNanos.Add(uint64(time.Since(start)))
}

// backpressureLength is the chain length at which the collector is late. It is what the collector
// prunes a thousand times a second, at a million overwrites of one key a second.
const backpressureLength = 1024

// stopLength is the chain length at which a writer waits for the collector, because the scheduler
// must have stopped it in the middle of its work: two megabytes of small versions of one key.
const stopLength = 16 * backpressureLength

// assist does the collector's work if it is late. A writer calls it after its commit, with the
// length of the longest chain that the commit has made.
func (c *collector) assist(length int) {
	switch {
	case length >= stopLength:
		c.mu.Lock()
	case length < backpressureLength || !c.mu.TryLock():
		return
	}
	c.collectLocked(nil, false)
	c.mu.Unlock()
}

// refresh recomputes and publishes the GC watermarks.
func (c *collector) refresh(now time.Time) {
	s := c.store
	c.live = s.registry.AdvanceLowWatermark(c.live, s.timeline.retained(), now)
}

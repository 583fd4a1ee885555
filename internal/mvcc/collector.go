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

	mu        sync.Mutex // guards what follows
	slot      *pin.Slot
	retention *retention
	live      []keys.Epoch

	collections, collectNanos atomic.Uint64
}

func newCollector(s *Store) *collector {
	return &collector{store: s, slot: s.registry.Slot(), retention: newRetention(s.options.Retention, s.options.GCInterval)}
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
	c.live = s.registry.AdvanceLowWatermark(c.live, c.retention.oldest(now, s.Visible()), now)
}

// samplesMax bounds the memory of the retention rule; a longer retention is sampled more coarsely.
const samplesMax = 4096

// retention remembers which epoch was visible when, so that retention by time becomes retention by epoch.
type retention struct {
	keepFor time.Duration
	every   time.Duration
	samples []sample // oldest first
}

type sample struct {
	at    time.Time
	epoch keys.Epoch
}

func newRetention(keep, interval time.Duration) *retention {
	return &retention{keepFor: keep, every: max(interval, keep/samplesMax)}
}

// oldest is the newest epoch that was visible at least keepFor ago: all epochs from it on stay
// readable.
func (r *retention) oldest(now time.Time, visible keys.Epoch) keys.Epoch {
	if r.keepFor == 0 {
		return visible
	}
	if n := len(r.samples); n == 0 || now.Sub(r.samples[n-1].at) >= r.every {
		r.samples = append(r.samples, sample{now, visible})
	}
	drop := 0
	for drop+1 < len(r.samples) && now.Sub(r.samples[drop+1].at) >= r.keepFor {
		drop++
	}
	r.samples = append(r.samples[:0], r.samples[drop:]...)
	return r.samples[0].epoch
}

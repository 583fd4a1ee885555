package storage

import (
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// holes writes n keys with values of a size and deletes the first ones of them, so that all other pages can move.
func (b *bench) holes(size, n, deleted int) {
	value := make([]byte, size)
	many := func(n int, write func(w *batch.Builder, key []byte)) {
		for i := 0; i < n; {
			var w batch.Builder
			for end := min(i+500, n); i < end; i++ {
				write(&w, fmt.Appendf(nil, "key-%05d", i))
			}
			b.commit(&w)
		}
		b.checkpoint()
	}
	many(n, func(w *batch.Builder, key []byte) { w.Set(keys.SpaceUser, key, value) })
	many(deleted, func(w *batch.Builder, key []byte) { w.Delete(keys.SpaceUser, key) })
	b.put(0, 1, 1)
	b.checkpoint() // the pages that were freed can be used from here on
}

// TestWritersAreNotRefusedWhilePagesMove: a checkpoint that began to move pages while there was no writer ends soon when clients write.
func TestWritersAreNotRefusedWhilePagesMove(t *testing.T) {
	testseed.SkipUnderRace(t)
	for name, c := range map[string]struct {
		size  int
		delay time.Duration // of each read
	}{"tree": {100, 8 * time.Millisecond}, "large values": {200, 30 * time.Millisecond}} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.holes(c.size, 30_000, 12_000)
			b.put(0, 1, 1)
			if err := b.engine.Rotate(t.Context()); err != nil {
				t.Fatal(err)
			}
			b.engine.options.StallMax = 2 * time.Second
			b.engine.memory.immutableBytes.Store(6 * b.engine.memory.memtableBytes)
			slow := b.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: dataName, Fault: vfs.Slow, Delay: c.delay})
			b.engine.checkpoints.request()
			stop := b.checkpointsOnRequest()
			defer func() {
				slow.Remove()
				stop()
			}()
			for slow.Fired() < 20 { // it moves pages
				time.Sleep(time.Millisecond)
			}
			before := b.engine.Stats().Checkpoints.Finished
			for i := range 700 {
				b.put(i%10, i%10+1, 1000)
				b.engine.Throttle(t.Context(), &b.writer, 1, 1010)
			}
			if b.engine.Stats().Checkpoints.Finished < before+4 {
				t.Error("there was memory for all writes")
			}
		})
	}
}

// TestACheckpointThatMovesPagesEndsWithItsContext: also while it only looks for pages to move.
func TestACheckpointThatMovesPagesEndsWithItsContext(t *testing.T) {
	for name, size := range map[string]int{"tree": 100, "large values": 200} {
		b := newBench(t)
		b.holes(size, 30_000, 12_000)
		b.put(0, 1, 1)
		if err := b.engine.Rotate(t.Context()); err != nil {
			t.Fatal(err)
		}
		reads := b.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: dataName, Fault: vfs.Slow})
		at := keys.Epoch(b.visible.Load())
		for after := 10; after < 400; after += 30 {
			before := reads.Fired()
			err := b.engine.Checkpoint(endingContext{t.Context(), reads, before + after}, GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}})
			if n := reads.Fired() - before; n > after+20 {
				t.Errorf("%s: %d reads, although the context ended after %d: %v", name, n, after, err)
			}
		}
	}
}

package storage

import (
	"runtime"
	"testing"
	"weak"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestGenerationsThatWereMergedGo: what still refers to an early generation or segment keeps none of the later ones.
func TestGenerationsThatWereMergedGo(t *testing.T) {
	for _, kind := range []string{"nothing", "an idle writer", "an idle validation", "retired versions"} {
		b := openBench(t, Options{PageSize: 512, MemoryBytes: 16 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10})
		var kept Writer
		var seen Validation
		switch kind {
		case "an idle writer":
			var w batch.Builder
			w.Set(keys.SpaceUser, []byte("k"), []byte("v"))
			b.commit(&w)
			kept, b.writer = b.writer, Writer{}
		case "an idle validation":
			b.slot.Enter()
			seen, _ = b.engine.BeginValidation()
			b.slot.Leave()
		case "retired versions":
			for range 300 {
				b.put(0, 1, 10)
				b.engine.QueueLongChains(&b.writer)
			}
			v := keys.Epoch(b.visible.Load())
			for range 3 {
				b.engine.Prune(b.slot, nil, memtable.GCWatermarks{MinVisible: 5, LowWatermark: v, Snapshots: []keys.Epoch{5, v}}, true)
			}
		}
		const rounds = 40
		var generations []weak.Pointer[generation]
		var segments []weak.Pointer[wal.Segment]
		for range rounds {
			b.put(0, 1, 10)
			b.checkpoint()
			g := b.engine.view.Load().active
			generations, segments = append(generations, weak.Make(g)), append(segments, weak.Make(g.segment))
			b.engine.Prune(b.slot, nil, memtable.GCWatermarks{MinVisible: keys.Epoch(b.visible.Load())}, true)
		}
		runtime.GC()
		runtime.GC()
		ofGenerations, ofSegments := 0, 0
		for i := range generations {
			if generations[i].Value() != nil {
				ofGenerations++
			}
			if segments[i].Value() != nil {
				ofSegments++
			}
		}
		if ofGenerations > 5 || ofSegments > 5 {
			t.Errorf("%s keeps %d generations and %d segments of %d", kind, ofGenerations, ofSegments, rounds)
		}
		runtime.KeepAlive(&kept)
		runtime.KeepAlive(&seen)
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

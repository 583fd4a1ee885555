package storage

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// TestOversizedRecordIsTheFirstOfItsGeneration: no other writer can fill a segment that was made for
// a large record before that record is in it.
func TestOversizedRecordIsTheFirstOfItsGeneration(t *testing.T) {
	b := newBench(t)
	defer func() {
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	for _, size := range []int{40 << 10, 64 << 10, 1 << 20} {
		b.put(0, 10, 100)
		var w batch.Builder
		w.Set(keys.SpaceUser, []byte("large"), []byte(strings.Repeat("v", size)))
		body, err := w.Finish()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := b.engine.Reserve(&b.writer, body); !errors.Is(err, ErrRotating) {
			t.Fatalf("%d bytes are reserved among small records: %v", size, err)
		}
		if b.engine.view.Load().active.sealed() {
			t.Fatalf("asking for %d bytes ended a segment that has room for small records", size)
		}
		reserved, err := b.engine.AdvanceGeneration(context.Background(), &b.writer, body, keys.MaxEpoch)
		if active := b.engine.view.Load().active; err != nil || !reserved || b.writer.Epoch() != active.first {
			t.Fatalf("%d bytes: reserved %v at epoch %d of a generation from %d: %v", size, reserved, b.writer.Epoch(), active.first, err)
		}
		b.engine.Record(&b.writer, body)
		if err := b.engine.Install(&b.writer, body, true); err != nil {
			t.Fatal(err)
		}
		b.visible.Store(uint64(b.writer.Epoch()))
		b.put(10, 20, 100)
		b.checkpoint()
	}
}

// TestSealedGenerationIsNotPruned: a checkpoint walks the chains of a sealed generation, whose versions must stay where they are.
func TestSealedGenerationIsNotPruned(t *testing.T) {
	b := newBench(t)
	defer func() {
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	for range longChainLength {
		b.put(0, 1, 8)
	}
	g := b.writer.generation
	b.engine.registry.AdvanceLowWatermark(nil, keys.MaxEpoch, time.Time{})
	before := g.mem.Versions()
	g.seal()
	if b.engine.PruneLongChains(&b.writer, 1); g.mem.Versions() != before {
		t.Fatalf("%d versions of %d are left", g.mem.Versions(), before)
	}
	b.engine.QueueLongChains(&b.writer)
	b.engine.Prune(b.engine.registry.Slot(), nil, memtable.GCWatermarks{MinVisible: longChainLength, LowWatermark: longChainLength}, false)
	if g.mem.Versions() != before {
		t.Fatalf("the collector left %d versions of %d", g.mem.Versions(), before)
	}
	g.end.Store(0)
	if b.engine.PruneLongChains(&b.writer, 1); g.mem.Versions() != 1 {
		t.Fatalf("%d versions are left in an open generation", g.mem.Versions())
	}
	g.end.Store(b.visible.Load() + 1)
}

// TestCheckpointWaitsForARunningPrune: from the moment that a checkpoint reads a generation, no
// pruning changes its chains.
func TestCheckpointWaitsForARunningPrune(t *testing.T) {
	b := newBench(t)
	b.put(0, 100, 8)
	b.engine.pruner.mu.Lock()
	done := make(chan struct{})
	go func() {
		defer close(done)
		b.engine.complete(0)
	}()
	select {
	case <-done:
		t.Error("a checkpoint did not wait for a prune under way")
	case <-time.After(20 * time.Millisecond):
	}
	b.engine.pruner.mu.Unlock()
	<-done
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestInteriorVersionsAreReusedOnlyAfterTheirReadersLeft: a reader may still use a version that was
// removed from the middle of its chain.
func TestInteriorVersionsAreReusedOnlyAfterTheirReadersLeft(t *testing.T) {
	b := newBench(t)
	defer func() {
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	for range longChainLength {
		b.put(0, 1, 8)
	}
	b.engine.QueueLongChains(&b.writer)
	reader, collector := b.engine.registry.Slot(), b.engine.registry.Slot()
	h := memtable.GCWatermarks{MinVisible: 10, LowWatermark: longChainLength, Snapshots: []keys.Epoch{10, longChainLength}}
	prune := func() uint64 {
		b.engine.Prune(collector, nil, h, false)
		return b.engine.pruner.reclaimed.Load()
	}
	reader.Enter()
	if prune(); b.engine.pruner.pruned.Load() != longChainLength-2 {
		t.Fatalf("%d versions pruned", b.engine.pruner.pruned.Load())
	}
	if n := prune(); n != 0 {
		t.Errorf("%d versions are used again under a reader", n)
	}
	reader.Leave()
	if n := prune(); n != longChainLength-2-9 { // versions older than epoch 10 need no wait
		t.Errorf("%d interior versions are used again once it has left", n)
	}
}

// TestOnlyCompleteGenerationsAreMerged: a generation in which an epoch is not installed yet is not
// merged, nor is any generation after it.
func TestOnlyCompleteGenerationsAreMerged(t *testing.T) {
	b := newBench(t)
	defer func() {
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	for i := range 2 {
		b.put(10*i, 10*i+10, 8) // epochs 1 to 10, and 11 to 20
		if err := b.engine.Rotate(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		visible keys.Epoch
		want    int
	}{{9, 0}, {10, 1}, {19, 1}, {20, 2}} {
		if got := len(b.engine.complete(c.visible)); got != c.want {
			t.Errorf("%d generations are complete at %d, want %d", got, c.visible, c.want)
		}
	}
}

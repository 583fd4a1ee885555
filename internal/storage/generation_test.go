package storage

import (
	"errors"
	"strings"
	"testing"
	"time"

	"epochkv/internal/storage/batch"
	"epochkv/internal/storage/keys"
)

// TestOversizedRecordIsTheFirstOfItsGeneration: nobody can fill a segment that was made for a large record before it.
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
		claimed, err := b.engine.Advance(&b.writer, body)
		if active := b.engine.view.Load().active; err != nil || !claimed || b.writer.Epoch() != active.first {
			t.Fatalf("%d bytes: claimed %v at epoch %d of a generation from %d: %v", size, claimed, b.writer.Epoch(), active.first, err)
		}
		b.engine.Install(&b.writer, body, true)
		b.visible.Store(uint64(b.writer.Epoch()))
		b.put(10, 20, 100)
		b.checkpoint()
	}
}

// TestWriterPrunesNoSealedGeneration: a checkpoint walks the chains of a sealed generation, whose versions must stay where they are.
func TestWriterPrunesNoSealedGeneration(t *testing.T) {
	b := newBench(t)
	defer func() {
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}()
	for range crowdedAt {
		b.put(0, 1, 8)
	}
	g := b.writer.generation
	b.engine.registry.Refresh(nil, keys.MaxEpoch, time.Time{})
	before := g.mem.Versions()
	g.seal()
	if b.engine.PruneCrowded(&b.writer); g.mem.Versions() != before {
		t.Fatalf("%d versions of %d are left", g.mem.Versions(), before)
	}
	g.end.Store(0)
	if b.engine.PruneCrowded(&b.writer); g.mem.Versions() != 1 {
		t.Fatalf("%d versions are left in an open generation", g.mem.Versions())
	}
	g.end.Store(uint64(b.visible.Load() + 1))
}

// TestCheckpointWaitsForWhoeverPrunes: from the moment that a checkpoint looks at a generation nobody changes its chains.
func TestCheckpointWaitsForWhoeverPrunes(t *testing.T) {
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

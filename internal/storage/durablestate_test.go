package storage

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestContextEndsTheWaitForACheckpoint: whatever takes the checkpointing mutex waits for a merge, or a bulk load, no longer than its context.
func TestContextEndsTheWaitForACheckpoint(t *testing.T) {
	b := newBench(t)
	b.put(0, 100, 50)
	b.checkpoint()
	load, err := b.engine.NewBulkLoad()
	if err != nil {
		t.Fatal(err)
	}
	if err := load.Add([]byte{byte(keys.SpaceUser), 'k'}, []byte("v")); err != nil {
		t.Fatal(err)
	}
	if _, err := load.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}
	pinned, err := b.engine.PinState(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	at := keys.Epoch(b.visible.Load())
	horizon := GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}
	if err := b.engine.checkpoints.mu.Lock(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, wait := range map[string]func(ctx context.Context) error{
		"checkpoint": func(ctx context.Context) error { return b.engine.Checkpoint(ctx, horizon) },
		"pin":        func(ctx context.Context) error { _, err := b.engine.PinState(ctx); return err },
		"quarantine": func(ctx context.Context) error { _, _, err := pinned.ReadNewestQuarantine(ctx); return err },
		"bulk load":  func(ctx context.Context) error { return b.engine.BuildBulkLoad(ctx, load, horizon) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		if err := wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		cancel()
	}
	b.engine.checkpoints.mu.Unlock()
	pinned.Release()
	if err := load.Close(); err != nil {
		t.Fatal(err)
	}
	if damages := b.found(); len(damages) != 0 {
		t.Errorf("damages: %v", damages)
	}
}

// TestPinnedStateKeepsItsPagesAndNoMemtables overwrites all of a pinned state: its pages stay, those of the states between are reused, and memtables are
// freed. After Release the pages are reused, too.
func TestPinnedStateKeepsItsPagesAndNoMemtables(t *testing.T) {
	b := newBench(t)
	b.put(0, 2000, 60)
	b.checkpoint()
	pinned, err := b.engine.PinState(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for range 5 {
		b.put(0, 2000, 60)
		b.checkpoint()
	}
	b.engine.Reclaim()
	if n := b.engine.memory.retired.bytes.Load(); n != 0 {
		t.Errorf("%d bytes of memtables wait for the pinned state", n)
	}
	pending, live := b.engine.pager.Stats().Pending, b.engine.pager.Stats().Live
	if pending > live*5/2 { // the state's own pages, and what the last checkpoint freed
		t.Errorf("%d pages are kept for a state of about %d", pending, live)
	}
	pinned.Release()
	b.checkpoint()
	b.put(0, 1, 1)
	b.checkpoint()
	b.checkpoint()
	if after := b.engine.pager.Stats().Pending; after >= pending/2 {
		t.Errorf("%d pages were pending while the state was pinned, %d are afterwards", pending, after)
	}
	if kinds := b.found(); len(kinds) > 0 {
		t.Error(kinds)
	}
}

// TestReleasedStatePinsNothing, whether its log was released before or not.
func TestReleasedStatePinsNothing(t *testing.T) {
	b := newBench(t)
	b.put(0, 1000, 60)
	b.checkpoint()
	for _, logFirst := range []bool{false, true} {
		pinned, err := b.engine.PinStateAndLog(t.Context(), "verify", "test")
		if err != nil {
			t.Fatal(err)
		}
		if list, _ := b.engine.log.Holders(); len(b.engine.checkpoints.pins.pinned) != 1 || len(list) != 2 || list[1].From != pinned.Pages.State().Epoch+1 {
			t.Errorf("not pinned: %v, %v", b.engine.checkpoints.pins.pinned, list)
		}
		if logFirst {
			pinned.ReleaseLog()
			pinned.ReleaseLog() // no effect
		}
		pinned.Release()
		if list, _ := b.engine.log.Holders(); len(b.engine.checkpoints.pins.pinned) > 0 || len(list) != 1 {
			t.Errorf("still pinned: %v, %v", b.engine.checkpoints.pins.pinned, list)
		}
	}
	if kinds := b.found(); len(kinds) > 0 {
		t.Error(kinds)
	}
}

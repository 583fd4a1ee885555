package storage

import (
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/wal"
)

// TestFullDiskEndsLogHolders: a reader that yields does not keep the log while the reserve for a full disk cannot be filled,
// and hears why.
func TestFullDiskEndsLogHolders(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 1 << 20})
	b.put(0, 10, 60)
	b.checkpoint()
	pinned, err := b.engine.PinStateAndLog(t.Context(), "verify", "test")
	if err != nil {
		t.Fatal(err)
	}
	defer pinned.Release()
	b.put(0, 3000, 60)
	b.checkpoint()
	held := b.engine.Stats().Log.SegmentBytes
	if err := pinned.RenewLog(); err != nil || held < 4*64<<10 {
		t.Fatalf("%v, %d bytes", err, held)
	}
	b.fs.SetCapacity(1)
	b.engine.pager.SetReserve(64 << 20)
	b.engine.CheckSpace()
	var gone *wal.HolderEndedError
	if err := pinned.RenewLog(); !errors.As(err, &gone) || gone.Owner != "test" {
		t.Fatalf("the holder: %v", err)
	}
	if now := b.engine.Stats().Log.SegmentBytes; now >= held/2 {
		t.Fatalf("%d bytes of log, %d while it was held", now, held)
	}
}

package storage

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestCrashesInARowOnAFullDiskLeaveDeletionsASegment: each start takes a segment of the log, and a process that ends before it writes anything leaves it empty.
// Nothing of it is merged, and so no checkpoint gave it back.
func TestCrashesInARowOnAFullDiskLeaveDeletionsASegment(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 1 << 20})
	b.put(0, 100, 100)
	b.checkpoint()
	b.fs.LeaveFree(0)
	for range 20 {
		o, crashed := b.engine.options, b.fs.Crash(0, vfs.SurviveProcess)
		_ = b.engine.Close()
		b.fs, b.faults, b.writer = crashed, vfs.NewFaulty(crashed), Writer{}
		b.visible.Store(uint64(b.open(o).Next - 1))
	}
	for range 3 {
		var w batch.Builder
		w.Delete(keys.SpaceUser, []byte("key-00007"))
		b.commit(&w)
		b.checkpoint()
	}
	if kinds := b.found(); len(kinds) != 0 {
		t.Error(kinds)
	}
}

package storage

import (
	"testing"
	"time"
)

// TestImmutableMemtablesWaitWhileCommitsCome: they are merged together with those to come, and soon when no more come.
func TestImmutableMemtablesWaitWhileCommitsCome(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, CheckpointBytes: 32 << 20})
	schedule := func() Work { return b.engine.Schedule(time.Hour, nil) }
	b.put(0, 2000, 100)
	if len(b.engine.view.Load().immutables) == 0 {
		t.Fatal("nothing is immutable")
	}
	rotated := func(ago time.Duration) { b.engine.memory.rotated.Store(time.Now().Add(-ago).UnixNano()) }
	rotated(immutableWaitIdle + time.Second)
	if work := schedule(); work != WorkNone {
		t.Errorf("while commits come: %v", work)
	}
	if work := schedule(); work != WorkMerge {
		t.Errorf("when none came since the last call: %v", work)
	}
	b.put(2000, 2001, 100)
	rotated(immutableWaitMax + time.Second)
	if work := schedule(); work != WorkMerge {
		t.Errorf("while commits come, after the longest wait: %v", work)
	}
	rotated(0)
	if work := schedule(); work != WorkNone {
		t.Errorf("just after a rotation: %v", work)
	}
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}

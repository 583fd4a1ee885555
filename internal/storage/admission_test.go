package storage

import (
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// readAll reads keys [from, to) at the newest epoch, and returns the pages that had to be read from the file.
func (b *bench) readAll(from, to int) (misses uint64) {
	b.t.Helper()
	before := b.engine.Stats().Cache.Misses
	r := b.engine.NewReader()
	for i := from; i < to; i++ {
		b.slot.Enter()
		_, found, err := r.Newest(keys.Append(nil, keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i)))
		b.slot.Leave()
		if err != nil || !found {
			b.t.Fatalf("key %d: found %v, %v", i, found, err)
		}
	}
	return b.engine.Stats().Cache.Misses - before
}

// TestCheckpointsOfUnreadKeysTakeNoCacheMemory: most pages that merges write into a large tree are written again before
// they are read, and the kernel would have to clear a fresh frame for each.
func TestCheckpointsOfUnreadKeysTakeNoCacheMemory(t *testing.T) {
	b := newBench(t)
	for range 3 {
		b.put(0, 2000, 100)
		b.checkpoint()
	}
	s := b.engine.Stats()
	if inner := s.Checkpoints.InnerPages; s.Cache.Resident > inner {
		t.Errorf("%d pages are cached, %d inner ones were written, of %d leaves none was read", s.Cache.Resident, inner, s.Checkpoints.LeafPages)
	}
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestFirstReadsAfterACheckpointFindWhatReadersHadCached, although the checkpoint has rewritten all of it; and the
// pages of keys that are new.
func TestFirstReadsAfterACheckpointFindWhatReadersHadCached(t *testing.T) {
	b := newBench(t)
	b.put(0, 2000, 100)
	b.checkpoint()
	if misses := b.readAll(0, 2000); misses == 0 {
		t.Error("nothing had to be read")
	}
	for range 3 {
		b.put(0, 2400, 100)
		b.checkpoint()
		if misses := b.readAll(0, 2400); misses != 0 {
			t.Errorf("%d pages had to be read after a checkpoint", misses)
		}
	}
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}

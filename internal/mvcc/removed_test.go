package mvcc

import (
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestRemovedEpochsAreRemembered over restarts, within a bound: the oldest repairs become one.
func TestRemovedEpochsAreRemembered(t *testing.T) {
	o := tiny(vfs.NewMem())
	s := mustOpen(t, o)
	for i := range keys.Epoch(removedMax + 1) {
		s.recovery.Removed = append(s.recovery.Removed, keys.EpochRange{First: 10*i + 2, Last: 10*i + 5})
	}
	if err := s.openRemoved(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if len(s.timeline.removed) != removedMax {
			t.Fatalf("%d repairs", len(s.timeline.removed))
		}
		for _, one := range []struct {
			at         keys.Epoch
			operations uint32
			removed    bool
		}{{1, 0, false}, {1, 1, true}, {2, 0, true}, {8, 0, true}, {14, 0, true}, {15, 0, false}, {21, 0, false}, {21, 1, true}, {24, 9, true}, {25, 1, false}} {
			if _, removed := s.Removed(one.at, one.operations); removed != one.removed {
				t.Errorf("after epoch %d and %d operations: %v", one.at, one.operations, removed)
			}
		}
		mustClose(t, s)
		s = mustOpen(t, o)
	}
}

package storage

import (
	"fmt"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAFailedReadOfACheckpointLosesNothing: whichever read it is, no page is lost, and no space.
func TestAFailedReadOfACheckpointLosesNothing(t *testing.T) {
	counted := false
	for n := 1; ; n++ {
		b := newBench(t)
		for i := range 10 {
			b.put(3*i, 3*i+3, 300+80*i) // some are cut, some have overflow pages
		}
		b.checkpoint()
		var w batch.Builder
		for i := range 20 {
			w.Delete(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i))
		}
		b.commit(&w)
		fault := b.faults.Inject(vfs.Rule{Op: vfs.OpRead, Name: dataName, Nth: n})
		b.checkpoint()
		fired := fault.Fired() > 0
		fault.Remove()
		s := b.engine.Stats()
		counted = counted || s.Damage.Reads > 0
		if kinds := b.found(); s.Blobs.Unfreed > 0 || !slices.Equal(kinds, nil) {
			t.Errorf("read %d: %d values are not freed, found %v", n, s.Blobs.Unfreed, kinds)
		}
		if !fired {
			break
		}
	}
	if !counted {
		t.Error("no failed read was counted")
	}
}

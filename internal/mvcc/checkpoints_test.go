package mvcc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestACheckpointOfEverythingFreesMemoryFirst: the goroutine that merges makes checkpoints of everything, too. With memory full, it does not wait in
// a rotation for a merge that no other goroutine makes.
func TestACheckpointOfEverythingFreesMemoryFirst(t *testing.T) {
	o := tiny(vfs.NewMem())
	o.Storage.MemoryBytes, o.Storage.StallMax = 2<<20, time.Second
	s := mustOpen(t, o)
	s.StopThrottling()
	s.lifecycle.stop()
	s.lifecycle.done.Wait() // the test stands for the goroutine
	x := mustSession(t, s)
	defer x.Close()
	for i := 0; !s.engine.AwaitsMerge(); i++ {
		if _, err := put(x, fmt.Sprint(i), strings.Repeat("v", 4000), DurabilityAsync); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Checkpoint(t.Context()); err != nil {
		t.Errorf("a checkpoint with memory full: %v", err)
	}
	if _, err := put(x, "later", "v", DurabilityAsync); err != nil {
		t.Errorf("a put after it: %v", err)
	}
}

package mvcc

import (
	"context"
	"errors"
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

// TestACheckpointOnAFullDiskLetsDeletionsGoOn: the log has no file for another segment before what is immutable is merged, which is for the goroutine of
// the checkpoint to do. The active generation goes on meanwhile.
func TestACheckpointOnAFullDiskLetsDeletionsGoOn(t *testing.T) {
	disk := vfs.NewMem()
	o := tiny(disk)
	o.Storage.DiskReserve, o.Storage.StallMax = 1<<20, time.Second
	s := mustOpen(t, o)
	s.lifecycle.stop()
	s.lifecycle.done.Wait() // the test stands for the goroutine
	x := mustSession(t, s)
	defer x.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	remove := func() {
		t.Helper()
		var w Write
		w.Delete([]byte("key"))
		if _, err := x.Commit(ctx, &w); err != nil {
			t.Fatalf("a deletion: %v", err)
		}
	}
	disk.SetCapacity(1)
	var err error
	for i := 0; err == nil && i < 100; i++ {
		remove()
		err = s.engine.Rotate(ctx)
	}
	if !errors.Is(err, vfs.ErrNoSpace) {
		t.Errorf("a rotation without a file: %v", err)
	}
	remove()
	if err := s.Checkpoint(ctx); err != nil {
		t.Errorf("a checkpoint: %v", err)
	}
	remove()
}

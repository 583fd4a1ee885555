package storage

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestARotationEndsNoMemtableWhileMemoryIsFull: neither if memory is full when it begins, nor if writers have filled it while it waited for a segment. The
// caller may be the one that merges, and nothing could be written until then.
func TestARotationEndsNoMemtableWhileMemoryIsFull(t *testing.T) {
	b := newBench(t)
	e := b.engine
	b.put(0, 100, 100)
	if err := e.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	allocate := make(chan struct{})
	b.fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpPreallocate && strings.HasSuffix(name, ".log") {
			<-allocate
		}
	})
	for stuck := false; !stuck; {
		if attempt := e.log.Prepare(0, false); attempt != nil {
			select {
			case <-attempt.Done():
			case <-time.After(50 * time.Millisecond):
				stuck = true
			}
			continue
		}
		b.put(0, 100, 100)
		if err := e.Rotate(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	b.put(0, 100, 100)
	v, most, rotated := e.view.Load(), e.memory.immutableBytes.Load(), make(chan error, 1)
	check := func(err error) {
		t.Helper()
		if !errors.Is(err, ErrMergeFirst) || v.active.sealed() {
			t.Errorf("%v; the memtable was ended: %v", err, v.active.sealed())
		}
	}
	full := e.immutableBytesOf(v) - 1
	e.memory.immutableBytes.Store(full)
	check(e.Rotate(t.Context()))
	e.memory.immutableBytes.Store(most)
	go func() { rotated <- e.Rotate(t.Context()) }()
	time.Sleep(20 * time.Millisecond) // it waits for the segment
	e.memory.immutableBytes.Store(full)
	close(allocate)
	check(<-rotated)
	e.memory.immutableBytes.Store(most)
	b.checkpoint()
}

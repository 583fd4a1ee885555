package server

import (
	"runtime"
	"testing"

	"github.com/epochkv/epochkv/internal/config"
)

// TestTheHeapMayGrowByWhatStays: the collector would otherwise run all the time beside idle transactions, scans and large answers whose clients take
// nothing, half-sent messages, and whatever else the heap keeps for long.
func TestTheHeapMayGrowByWhatStays(t *testing.T) {
	_, becomes := mustFollowHeap(t, func(c *config.Config) { c.Memory = 64 * config.MiB })
	taken := &takenInTests
	taken.Store(20 << 20)
	becomes("what it is at least", 0)
	taken.Store(80 << 20)
	becomes("what stays, and garbage beside it", 80<<20+heapGarbage-heapBytesMin)
	taken.Store(10 << 20)
	becomes("what it was", 0)
	taken.Store(1 << 40)
	c := config.Default()
	c.Memory = 64 * config.MiB
	becomes("what the bound of memory leaves for it", int64(c.HeapKept())-heapBytesMin)
}

// TestWhatTheHeapKeepsIsTheLeastOfLate: requests come and go.
func TestWhatTheHeapKeepsIsTheLeastOfLate(t *testing.T) {
	var k heapKept
	for i := range heapKeptLooks - 1 {
		k.note(100)
		if got := k.least(); got != 0 {
			t.Fatalf("%d after %d looks, want 0", got, i+1)
		}
	}
	k.note(100)
	if got := k.least(); got != 100 {
		t.Fatalf("%d after all looks, want 100", got)
	}
	k.note(30)
	for range heapKeptLooks - 1 {
		k.note(500)
		if got := k.least(); got != 30 {
			t.Fatalf("%d, want the least, 30", got)
		}
	}
	k.note(500)
	if got := k.least(); got != 500 {
		t.Fatalf("%d, want 500", got)
	}
}

// TestTheRuntimeSaysWhatTheHeapKeeps: what is live counts, and garbage does not.
func TestTheRuntimeSaysWhatTheHeapKeeps(t *testing.T) {
	const size = 64 << 20
	runtime.GC()
	before := heapTaken()
	kept := make([]byte, size)
	runtime.GC()
	if grown := heapTaken() - before; grown < size/2 || grown > 2*size {
		t.Errorf("%d bytes with %d more that are live", grown, size)
	}
	runtime.KeepAlive(kept)
	runtime.GC()
	if grown := heapTaken() - before; grown > size/2 {
		t.Errorf("%d bytes after they are gone", grown)
	}
}

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

// TestWhatTheHeapKeepsNeedNotBeThereAllTheTime: most requests come and go. But clients that let very much wait, give it up for a moment, and begin
// again must not keep the limit from following it.
func TestWhatTheHeapKeepsNeedNotBeThereAllTheTime(t *testing.T) {
	var k heapKept
	for i := range heapKeptMost - 1 {
		k.note(100)
		if got := k.often(); got != 0 {
			t.Fatalf("%d after %d looks, want 0", got, i+1)
		}
	}
	k.note(100)
	if got := k.often(); got != 100 {
		t.Fatalf("%d after %d looks, want 100", got, heapKeptMost)
	}
	for i := range 4 * heapKeptLooks {
		if i%13 < 12 { // three seconds
			k.note(500)
		} else {
			k.note(30)
		}
		if got := k.often(); i >= heapKeptMost && got != 500 {
			t.Fatalf("%d after look %d, want 500", got, i)
		}
	}
	for range heapKeptLooks - heapKeptMost {
		k.note(30)
	}
	k.note(30)
	if got := k.often(); got != 30 {
		t.Fatalf("%d after it has gone, want 30", got)
	}
}

// TestTheRuntimeSaysWhatTheHeapKeeps: what is live counts, and garbage does not.
func TestTheRuntimeSaysWhatTheHeapKeeps(t *testing.T) {
	const size, attempts = 64 << 20, 10 // what earlier tests have left may go meanwhile
	for attempt := 1; ; attempt++ {
		runtime.GC()
		before := heapTaken()
		kept := make([]byte, size)
		runtime.GC()
		with := heapTaken() - before
		runtime.KeepAlive(kept)
		runtime.GC()
		without := heapTaken() - before
		if with >= size/2 && with <= 2*size && without <= size/2 {
			return
		}
		if attempt == attempts {
			t.Fatalf("%d bytes with %d more that are live, and %d after they are gone", with, size, without)
		}
	}
}

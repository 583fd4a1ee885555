package pin

import (
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestReaderWhoseStoreIsLateIsSeen: a processor may delay the store of a tick while its reader
// already loads the pointer. The reader of this test makes that likely with stores to far-away
// memory before the store of its tick, and reads the object a while later. The object that it
// reached must not have been reused by then.
func TestReaderWhoseStoreIsLateIsSeen(t *testing.T) {
	if runtime.GOMAXPROCS(0) < 2 {
		t.Skip("one processor sees its own stores in order")
	}
	const objects, far = 1 << 10, 64 << 20
	r, _ := newTestRegistry(1)
	s := r.Slot()
	defer s.Free()
	var current atomic.Uint64
	var gone [objects]atomic.Uint64 // the round in which the object was reused last
	var stop atomic.Bool
	broken := make(chan uint64, 1)
	go func() {
		defer close(broken)
		away := make([]byte, far)
		at := uint64(1)
		for !stop.Load() {
			for range 8 {
				at = at*6364136223846793005 + 1442695040888963407
				away[at>>38&(far-1)]++
			}
			s.Enter()
			i := current.Load()
			before := gone[i%objects].Load()
			for range 4 {
				if now := gone[i%objects].Load(); now == i+1 || before == i+1 {
					broken <- i
					s.Leave()
					return
				}
			}
			s.Leave()
		}
	}()
	rounds := uint64(0)
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); rounds++ {
		old := current.Load()
		current.Store(old + 1)
		for tick := r.Retire(); r.OldestTick() <= tick; {
		}
		gone[old%objects].Store(old + 1)
	}
	stop.Store(true)
	if i, bad := <-broken; bad {
		t.Fatalf("object %d was reused under its reader", i)
	}
	t.Logf("%d objects were reused", rounds)
}

// TestCounterLagsByLessThanItsBound: an added count is published soon, and Flush publishes it at
// once.
func TestCounterLagsByLessThanItsBound(t *testing.T) {
	var c Counter
	added := uint64(0)
	for _, n := range []uint64{1, 1, publishEvery - 3, 1, publishEvery, 5, 1000, 1} {
		c.Add(n)
		if added += n; c.Count() > added || added-c.Count() >= publishEvery {
			t.Errorf("%d added, %d published", added, c.Count())
		}
	}
	if c.Flush(); c.Count() != added {
		t.Errorf("%d published after Flush, want %d", c.Count(), added)
	}
}

// TestLowWatermarkNeverFalls: an epoch that was not readable stays unreadable when retention grows.
func TestLowWatermarkNeverFalls(t *testing.T) {
	r, _ := newTestRegistry(9)
	r.AdvanceLowWatermark(nil, forever, time.Now())
	if live := r.AdvanceLowWatermark(nil, 5, time.Now()); r.LowWatermark() != 9 || live[0] != 9 {
		t.Fatalf("the low watermark fell to %d, needed epochs are %d", r.LowWatermark(), live)
	}
}

// TestNewestSnapshotsSeeTheStoresOwnRecords: a snapshot of the newest epoch is among the epochs for which the store's own records
// are kept, or it is taken again, however far the retention keeps user data back.
func TestNewestSnapshotsSeeTheStoresOwnRecords(t *testing.T) {
	r, v := newTestRegistry(5)
	s := r.Slot()
	defer s.Free()
	s.OpenSnapshot()
	v.Store(9)
	r.AdvanceLowWatermark(nil, 1, time.Now())
	if got := r.SystemEpochs(nil); !slices.Equal(got, []keys.Epoch{5, 9}) || r.LowWatermark() != 1 {
		t.Fatalf("epochs %v, low watermark %d", got, r.LowWatermark())
	}
	v.Store(5) // what a reader sees if its load of visible is old
	taken := make(chan keys.Epoch)
	late := r.Slot()
	defer late.Free()
	go func() { taken <- late.OpenSnapshot() }()
	select {
	case e := <-taken:
		t.Fatalf("snapshot at %d, below 9", e)
	case <-time.After(10 * time.Millisecond):
	}
	v.Store(9)
	if e := <-taken; e != 9 {
		t.Fatalf("snapshot at %d, want 9", e)
	}
}

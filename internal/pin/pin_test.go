package pin

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
)

func newTestRegistry(visible uint64) (*Registry, *atomic.Uint64) {
	v := new(atomic.Uint64)
	v.Store(visible)
	return NewRegistry(v), v
}

// forever is a retained epoch that by itself keeps no past epoch readable.
const forever = keys.MaxEpoch

func TestMinVisibleIsVisibleWithoutSnapshots(t *testing.T) {
	r, v := newTestRegistry(7)
	if live := r.AdvanceLowWatermark(nil, forever, time.Now()); len(live) != 1 || live[0] != 7 {
		t.Fatalf("needed epochs are %v, want [7]: never infinity, never zero", live)
	}
	v.Store(9)
	r.AdvanceLowWatermark(nil, forever, time.Now())
	if got := r.MinVisible(); got != 9 {
		t.Fatalf("min-visible = %d, want 9", got)
	}
}

func TestSnapshotHoldsItsEpochUntilReleased(t *testing.T) {
	r, v := newTestRegistry(5)
	s := r.Slot()
	defer s.Free()
	if e := s.OpenSnapshot(); e != 5 {
		t.Fatalf("snapshot at %d, want 5", e)
	}
	v.Store(50)
	live := r.AdvanceLowWatermark(nil, forever, time.Now())
	if len(live) != 2 || live[0] != 5 || live[1] != 50 {
		t.Fatalf("needed epochs are %v, want [5 50]", live)
	}
	s.CloseSnapshot()
	if live = r.AdvanceLowWatermark(live, forever, time.Now()); len(live) != 1 || live[0] != 50 {
		t.Fatalf("needed epochs are %v, want [50]", live)
	}
}

func TestFreedSlotHoldsNothing(t *testing.T) {
	r, v := newTestRegistry(5)
	s := r.Slot()
	s.OpenSnapshot()
	s.Enter()
	s.Free() // a broken connection: the owner did not call CloseSnapshot or Leave
	v.Store(6)
	if live := r.AdvanceLowWatermark(nil, forever, time.Now()); live[0] != 6 {
		t.Fatalf("needed epochs are %v, want [6]", live)
	}
	if tick := r.Retire(); r.OldestTick() <= tick {
		t.Fatal("a freed slot still protects memory")
	}
}

func TestNamedEpochIsReadableOnlyWhileASnapshotHasIt(t *testing.T) {
	r, v := newTestRegistry(10)
	a, b := r.Slot(), r.Slot()
	defer a.Free()
	defer b.Free()
	a.OpenSnapshot()
	v.Store(20)
	now := time.Now()
	r.AdvanceLowWatermark(nil, forever, now)
	for _, c := range []struct {
		epoch keys.Epoch
		want  bool
	}{{20, true}, {25, true}, {10, true}, {11, false}, {9, false}} {
		if got := b.OpenSnapshotAt(c.epoch); got != c.want {
			t.Errorf("OpenSnapshotAt(%d) = %v, want %v", c.epoch, got, c.want)
		}
		b.CloseSnapshot()
	}
	a.CloseSnapshot()
	if b.OpenSnapshotAt(10) {
		t.Error("epoch 10 is readable after its only snapshot ended")
	}
	if b.Epoch() != 0 {
		t.Error("a refused snapshot stays registered")
	}
}

func TestLeaseKeepsEpochReadableUntilItsDeadline(t *testing.T) {
	r, v := newTestRegistry(10)
	now := time.Now()
	r.AddLease(9, "a", now.Add(time.Second/2), 1)
	r.AddLease(10, "a", now.Add(time.Second), 1)
	if leases := r.Leases(); len(leases) != 1 || leases[0].Epoch != 10 {
		t.Fatalf("%v: the lease above the bound must end the other", leases)
	}
	v.Store(20)
	if live := r.AdvanceLowWatermark(nil, forever, now); live[0] != 10 {
		t.Fatalf("needed epochs are %v, want 10 first", live)
	}
	if live := r.AdvanceLowWatermark(nil, forever, now.Add(2*time.Second)); live[0] != 20 {
		t.Fatalf("needed epochs are %v, want [20] after the lease ended", live)
	}
}

func TestRetentionKeepsPastEpochsReadable(t *testing.T) {
	r, v := newTestRegistry(10)
	v.Store(20)
	r.AdvanceLowWatermark(nil, 12, time.Now())
	s := r.Slot()
	defer s.Free()
	if !s.OpenSnapshotAt(12) || s.OpenSnapshotAt(11) {
		t.Fatal("retention at 12 must allow 12 and refuse 11")
	}
}

func TestRetiredObjectWaitsForReadersInside(t *testing.T) {
	r, _ := newTestRegistry(1)
	s := r.Slot()
	defer s.Free()
	s.Enter()
	s.Enter()
	tick := r.Retire()
	s.Leave()
	if r.OldestTick() > tick {
		t.Fatal("a reader is inside, and the object may be reused")
	}
	s.Leave()
	if r.OldestTick() <= tick {
		t.Fatal("no reader is inside, and the object may not be reused")
	}
	s.Enter()
	defer s.Leave()
	if r.OldestTick() <= tick {
		t.Fatal("a reader that entered later holds back an older retirement")
	}
}

// TestReaderNeverLosesTheRaceWithTheCollector lets readers register while min-visible is computed:
// the min-visible epoch that is in force after a snapshot was granted must never exceed the
// snapshot. The two tests of the GC low watermark below hit the critical moment more surely.
func TestReaderNeverLosesTheRaceWithTheCollector(t *testing.T) {
	r, v := newTestRegistry(1)
	var pruned atomic.Uint64 // everything below is gone
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		var live []keys.Epoch
		for {
			select {
			case <-stop:
				return
			default:
			}
			v.Add(1)
			live = r.AdvanceLowWatermark(live, forever, time.Now())
			pruned.Store(uint64(live[0]))
		}
	})
	for range 4 {
		wg.Go(func() {
			s := r.Slot()
			defer s.Free()
			for range 20000 {
				e := s.OpenSnapshot()
				if p := pruned.Load(); uint64(e) < p {
					t.Errorf("snapshot %d granted, but everything below %d was pruned", e, p)
				}
				s.CloseSnapshot()
			}
		})
	}
	time.Sleep(50 * time.Millisecond)
	close(stop)
	wg.Wait()
}

func TestSlotWordsHaveTheirOwnCacheLines(t *testing.T) {
	r, _ := newTestRegistry(1)
	a, b := r.Slot(), r.Slot()
	pa, pb := uintptr(unsafe.Pointer(&a.tick)), uintptr(unsafe.Pointer(&b.tick))
	if d := max(pa, pb) - min(pa, pb); d < cacheLinePair {
		t.Fatalf("hot words of two slots are %d bytes apart", d)
	}
	if last := uintptr(unsafe.Pointer(&a.depth)); pa/64 != last/64 || pa%8 != 0 {
		t.Fatalf("hot words at %#x to %#x straddle lines", pa, last)
	}
}

func BenchmarkEnterLeave(b *testing.B) {
	r, _ := newTestRegistry(1)
	b.RunParallel(func(pb *testing.PB) {
		s := r.Slot()
		defer s.Free()
		for pb.Next() {
			s.Enter()
			s.Leave()
		}
	})
}

func BenchmarkSnapshot(b *testing.B) {
	r, _ := newTestRegistry(1)
	b.RunParallel(func(pb *testing.PB) {
		s := r.Slot()
		defer s.Free()
		for pb.Next() {
			s.OpenSnapshot()
			s.CloseSnapshot()
		}
	})
}

// TestRefusedReaderMakesNoEpochReadable: an epoch that nothing protects stays unreadable, even if
// another reader asks for it at the same moment, or is about to notice that its snapshot came too
// late.
func TestRefusedReaderMakesNoEpochReadable(t *testing.T) {
	r, v := newTestRegistry(5)
	late, s := r.Slot(), r.Slot()
	defer late.Free()
	defer s.Free()
	v.Store(9)
	r.AdvanceLowWatermark(nil, forever, time.Now())
	late.epoch.Store(5) // stored, and not yet compared with the low watermark
	if s.OpenSnapshotAt(5) {
		t.Fatal("epoch 5 was collected, and is readable again because another reader is being refused")
	}
	r.AdvanceLowWatermark(nil, forever, time.Now()) // sees the epoch of the late slot, and still does not make it readable
	if s.OpenSnapshotAt(5) {
		t.Fatal("a later AdvanceLowWatermark kept the epoch of the reader that came too late")
	}
}

// TestSnapshotBelowTheLowWatermarkIsTakenAgain: a reader that loaded visible, and stored it after
// the collector had published its low watermark and scanned the slots, must notice that it came too
// late.
func TestSnapshotBelowTheLowWatermarkIsTakenAgain(t *testing.T) {
	r, v := newTestRegistry(5)
	s := r.Slot()
	defer s.Free()
	r.lowWatermark.Store(6)
	r.newestFloor.Store(6) // what a reader sees if its load of visible is old
	taken := make(chan keys.Epoch)
	go func() { taken <- s.OpenSnapshot() }()
	select {
	case e := <-taken:
		t.Fatalf("snapshot at %d, below a low watermark of 6", e)
	case <-time.After(10 * time.Millisecond):
	}
	v.Store(6)
	if e := <-taken; e != 6 {
		t.Fatalf("snapshot at %d, want 6", e)
	}
}

// TestUsageNamesTheSnapshotsThatPreventGC: a snapshot has an age, from the time at which
// AdvanceLowWatermark first found its epoch below the low watermark until the snapshot ends. A
// snapshot of the newest epoch has no age, however often it is opened.
func TestUsageNamesTheSnapshotsThatPreventGC(t *testing.T) {
	r, v := newTestRegistry(5)
	first, second, fresh := r.Slot(), r.Slot(), r.Slot()
	for _, s := range []*Slot{first, second, fresh} {
		defer s.Free()
	}
	now := time.Unix(1000, 0)
	r.AdvanceLowWatermark(nil, forever, now)
	first.OpenSnapshot()
	r.AdvanceLowWatermark(nil, forever, now)
	if u := r.Usage(now.Add(time.Hour)); u.OldestAge != 0 || u.Longest != nil {
		t.Fatalf("a snapshot of the newest epoch has an age: %+v", u)
	}
	v.Store(7)
	second.OpenSnapshot()
	r.AdvanceLowWatermark(nil, forever, now)
	v.Store(9)
	fresh.OpenSnapshot()
	r.AdvanceLowWatermark(nil, forever, now.Add(time.Minute))
	u := r.Usage(now.Add(2 * time.Minute))
	want := []Snapshot{{first.index, 5, 2 * time.Minute}, {second.index, 7, time.Minute}}
	if !slices.Equal(u.Longest, want) || u.OldestAge != 2*time.Minute || u.Oldest != 5 || u.Snapshots != 3 {
		t.Fatalf("usage %+v, want %+v of 3", u, want)
	}
	first.CloseSnapshot()
	if u := r.Usage(now.Add(3 * time.Minute)); u.OldestAge != 2*time.Minute || u.Longest[0].Slot != second.index {
		t.Fatalf("after the first has ended: %+v", u)
	}
	first.OpenSnapshot() // another snapshot in the same slot
	v.Store(10)
	r.AdvanceLowWatermark(nil, forever, now.Add(3*time.Minute))
	if u := r.Usage(now.Add(4 * time.Minute)); len(u.Longest) != 3 || u.Longest[1] != (Snapshot{first.index, 9, time.Minute}) {
		if u.Longest[2] != (Snapshot{first.index, 9, time.Minute}) {
			t.Fatalf("a new snapshot has the age of the old one: %+v", u)
		}
	}
}

// TestLowWatermarkIsPublishedBeforeTheSlotsAreScanned: a reader that loaded visible long ago, and
// stores it in a slot that the scan has already passed, must find the new low watermark. The test
// makes the scan long, and the reader's slot is the first one that the scan reads.
func TestLowWatermarkIsPublishedBeforeTheSlotsAreScanned(t *testing.T) {
	const rounds, slots = 500, 64 * chunkSlots
	r, v := newTestRegistry(1)
	var reader *Slot
	for range slots {
		s := r.Slot()
		defer s.Free()
		if s.index == 0 {
			reader = s
		}
	}
	var live []keys.Epoch
	for n := range uint64(rounds) {
		live = r.AdvanceLowWatermark(live, forever, time.Time{})
		late := v.Add(1) - 1
		granted, start := make(chan bool), make(chan struct{})
		go func() {
			<-start
			for range n * 4 {
				_ = r.visible.Load() // take some time
			}
			reader.epoch.Store(late)
			granted <- late >= r.lowWatermark.Load()
		}()
		close(start)
		live = r.AdvanceLowWatermark(live, forever, time.Time{})
		if <-granted && uint64(live[0]) > late {
			t.Fatalf("round %d: a snapshot at %d was granted, and the minimum is %d", n, late, live[0])
		}
		reader.CloseSnapshot()
	}
}

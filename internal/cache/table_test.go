package cache

import (
	"sync"
	"testing"
)

// TestTableAgreesWithAMap inserts and removes at random in a table that is small enough for long
// runs that wrap around.
func TestTableAgreesWithAMap(t *testing.T) {
	const frames = 32
	tab, err := newTable(frames)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tab.mem.release() }()
	random := seeded(t)
	model := map[ID]uint32{}
	for range 100_000 {
		id := ID(random.Uint32N(3*frames) + 1)
		if _, ok := model[id]; ok {
			tab.remove(id)
			delete(model, id)
		} else if len(model) < frames {
			f := random.Uint32N(framesMax)
			tab.insert(id, f)
			model[id] = f
		}
		probe := ID(random.Uint32N(3 * frames))
		f, ok := tab.lookup(probe)
		if want, in := model[probe]; ok != in || ok && f != want {
			t.Fatalf("page %d: frame %d %v, want %d %v", probe, f, ok, want, in)
		}
	}
}

// TestLookupWhileTheTableMovesNeverFindsAnotherPage looks up during insertions and removals.
// Missing an entry is allowed.
func TestLookupWhileTheTableMovesNeverFindsAnotherPage(t *testing.T) {
	const frames = 64
	tab, err := newTable(frames)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tab.mem.release() }()
	random := seeded(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		defer close(stop)
		in := map[ID]bool{}
		for range 200_000 {
			id := ID(random.Uint32N(2*frames) + 1)
			if in[id] {
				tab.remove(id)
			} else if len(in) < frames {
				tab.insert(id, uint32(id)) // the number of a page's frame is its id
			}
			if in[id] = !in[id]; !in[id] || len(in) > frames {
				delete(in, id)
			}
			if _, ok := tab.lookup(id); ok != in[id] {
				t.Errorf("page %d: found %v, in %v", id, ok, in[id])
				return
			}
		}
	})
	for range 2 {
		wg.Go(func() {
			for id := ID(1); ; id = id%(2*frames) + 1 {
				select {
				case <-stop:
					return
				default:
				}
				if f, ok := tab.lookup(id); ok && f != uint32(id) {
					t.Errorf("page %d was found in frame %d", id, f)
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestHistoryCountsRefaultsAndLosesOldEntries(t *testing.T) {
	const frames = 1024
	h := newHistory(frames)
	for want := uint8(1); want <= refaultsMax+1; want++ {
		h.evicted(77, want-1)
		if got := h.refaulted(77); got != min(want, refaultsMax) {
			t.Errorf("refault %d counted as %d", want, got)
		}
		if h.refaulted(77) != 0 {
			t.Error("one eviction caused two refaults")
		}
	}
	for id := range ID(20 * frames) {
		h.evicted(1000+id, 0)
	}
	old, recent := 0, 0
	for id := range ID(frames) {
		old += int(h.refaulted(1000 + id))
		recent += int(h.refaulted(1000 + 19*frames + id))
	}
	if old > frames/50 || recent < frames/2 {
		t.Errorf("of %d evictions each, %d old ones and %d recent ones are remembered", frames, old, recent)
	}
}

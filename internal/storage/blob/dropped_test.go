package blob

import (
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestIDSetAgreesWithAMap, whether ids are near each other or far from each other.
func TestIDSetAgreesWithAMap(t *testing.T) {
	for _, space := range []uint64{300, 5000, 1 << 40} {
		rng, set, want := rand.New(rand.NewPCG(space, 1)), idSet{}, map[uint64]bool{}
		for range 2000 {
			if id := rng.Uint64N(space); !want[id] {
				want[id] = true
				set.add(id)
			}
		}
		for range 2000 {
			if id := rng.Uint64N(space); set.has(id) != want[id] {
				t.Fatalf("%d of %d: %v", id, space, set.has(id))
			}
		}
		sorted := slices.Sorted(maps.Keys(want))
		dropped := newDroppedBlobs(7, set)
		var all []uint64
		dropped.each(func(id uint64) { all = append(all, id) })
		if slices.Sort(all); !slices.Equal(all, sorted) || dropped.count() != len(sorted) || set.count != len(sorted) {
			t.Fatalf("%d of %d ids, counts %d and %d", len(all), len(sorted), set.count, dropped.count())
		}
		if asList := len(dropped.list) > 0; asList != (space > 1<<20) {
			t.Errorf("ids below %d are a list: %v", space, asList)
		}
		for range 100 {
			from := sorted[rng.IntN(len(sorted))] - min(rng.Uint64N(3), sorted[0])
			to, part := from+rng.Uint64N(3000), []uint64(nil)
			set.eachIn(from, to, func(id uint64) { part = append(part, id) })
			first, _ := slices.BinarySearch(sorted, from)
			end, _ := slices.BinarySearch(sorted, to)
			if !slices.Equal(part, sorted[first:end]) {
				t.Fatalf("from %d to %d: %v, want %v", from, to, part, sorted[first:end])
			}
		}
	}
}

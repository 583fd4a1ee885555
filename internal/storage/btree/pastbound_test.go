package btree

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
)

// TestALeafWhosePastIsGoneIsLeftAlone: leaves begin between versions of keys while the past is kept. When it is gone, a merge of one key rewrites the
// leaf with the key, and not those that have begun so.
func TestALeafWhosePastIsGoneIsLeftAlone(t *testing.T) {
	const count = 3000
	s, rng, epoch, root := newStore(1024), rand.New(rand.NewPCG(5, 6)), keys.Epoch(0), Root{}
	merge := func(chosen []int, minVisible keys.Epoch) (leaves int) {
		var entries []Entry
		slices.Sort(chosen)
		for _, i := range slices.Compact(chosen) {
			epoch++
			entries = append(entries, set(fmt.Sprintf("key%05d", i), epoch, string(make([]byte, 20+i%60))))
		}
		res := s.apply(t, s.mergeInput(root, entries, Policy{MinVisible: min(minVisible, epoch)}))
		root = res.Root
		return res.Stats.LeafPages
	}
	random := func(n int) (chosen []int) {
		for range n {
			chosen = append(chosen, rng.IntN(count))
		}
		return chosen
	}
	for range 12 {
		merge(random(count), 0)
	}
	kept := len(s.pages)
	for range 40 {
		merge(random(100), keys.MaxEpoch)
	}
	if len(s.pages)*2 > kept {
		t.Fatalf("%d of %d pages are left", len(s.pages), kept)
	}
	s.check(t, root)
	written := 0
	for range 20 {
		written += merge(random(1), keys.MaxEpoch)
	}
	if written > 40 {
		t.Errorf("20 merges of one key have written %d leaves", written)
	}
	s.check(t, root)
}

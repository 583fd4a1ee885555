package workload

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestTheSameSeedGivesEveryArmTheSamePairs(t *testing.T) {
	a, b, c := NewData(7, 10, Shape{16, 100}), NewData(7, 10, Shape{16, 100}), NewData(8, 10, Shape{16, 100})
	if !slices.Equal(a.keys, b.keys) || !slices.Equal(a.filler, b.filler) {
		t.Error("the same seed gave different data")
	}
	if slices.Equal(a.keys, c.keys) {
		t.Error("another seed gave the same keys")
	}
}

func TestSortedPairsAreInOrderAndSpread(t *testing.T) {
	d := NewSorted(7, 10_000, Shape{16, 100})
	quarters := [4]int{}
	for i := range d.Count() {
		if i > 0 && bytes.Compare(d.Key(i-1), d.Key(i)) >= 0 {
			t.Fatalf("key %d is not above the one before", i)
		}
		quarters[d.Key(i)[0]>>6]++
	}
	if slices.Min(quarters[:]) < 2400 {
		t.Errorf("keys by quarter of the key space: %v", quarters)
	}
	if order := d.Order(); !slices.IsSorted(order) {
		t.Error("the order of sorted pairs is not theirs")
	}
	if order := NewData(7, 10, Shape{16, 100}).Order(); slices.IsSorted(order) {
		t.Error("random pairs come in order")
	}
}

func TestZipfDrawsTheFewMostOfTheTime(t *testing.T) {
	const n, draws = 10_000, 100_000
	z := NewZipf(rand.New(rand.NewPCG(1, 1)), n, SkewYCSB)
	hot := 0
	for range draws {
		rank := z.Next()
		if rank < 0 || rank >= n {
			t.Fatalf("rank %d of %d", rank, n)
		}
		if rank < n/100 {
			hot++
		}
	}
	if share := float64(hot) / draws; share < 0.45 || share > 0.65 {
		t.Errorf("one key in a hundred got %.2f of the draws, want about half", share)
	}
}

// TestTableKeysAreDifferentAndHaveOneLength: loads count keys, and verify each by its number.
func TestTableKeysAreDifferentAndHaveOneLength(t *testing.T) {
	for _, count := range []uint64{1, 2, 3, 1000, 12_345} {
		seen := map[string]bool{}
		for i := range count {
			key := TableKey(nil, Permute(7, i, count))
			if len(key) != TableKeyBytes {
				t.Fatalf("%q has %d bytes", key, len(key))
			}
			seen[string(key)] = true
		}
		if uint64(len(seen)) != count {
			t.Errorf("%d keys of %d", len(seen), count)
		}
	}
}

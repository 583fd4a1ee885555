package workload

import (
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

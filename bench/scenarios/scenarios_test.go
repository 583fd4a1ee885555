package scenarios

import (
	"math/rand/v2"
	"slices"
	"testing"

	"epochkv/bench/harness"
)

// A figure whose arm is misspelt would silently never be judged.
func TestFiguresNameArmsAndPointsOfTheirScenario(t *testing.T) {
	seen := map[string]bool{}
	for _, s := range All() {
		if seen[s.Name] {
			t.Errorf("two scenarios are called %s", s.Name)
		}
		seen[s.Name] = true
		known := func(arm string) bool {
			return slices.ContainsFunc(s.Arms, func(a harness.Arm) bool { return a.Name == arm })
		}
		for _, f := range s.Figures {
			if !known(f.Arm) || f.Against != "" && !known(f.Against) {
				t.Errorf("%s: figure names arms %q and %q, which are not both there", s.Name, f.Arm, f.Against)
			}
			for _, point := range f.Points {
				if !slices.Contains(s.Axis.Points, point) {
					t.Errorf("%s: figure names point %d, which is not on the axis", s.Name, point)
				}
			}
		}
	}
}

func TestTheSameSeedGivesEveryArmTheSamePairs(t *testing.T) {
	a, b, c := newData(7, 10, shape{16, 100}), newData(7, 10, shape{16, 100}), newData(8, 10, shape{16, 100})
	if !slices.Equal(a.keys, b.keys) || !slices.Equal(a.filler, b.filler) {
		t.Error("the same seed gave different data")
	}
	if slices.Equal(a.keys, c.keys) {
		t.Error("another seed gave the same keys")
	}
}

func TestZipfDrawsTheFewMostOfTheTime(t *testing.T) {
	const n, draws = 10_000, 100_000
	z := newZipf(rand.New(rand.NewPCG(1, 1)), n)
	hot := 0
	for range draws {
		rank := z.next()
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

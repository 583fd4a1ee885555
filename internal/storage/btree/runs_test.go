package btree

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestRunsChangeNoByte compares merges that copy runs of old entries with those that decode each entry: pages, large values, and
// counts. Policies have snapshots and an expired range, leaves have tombstones and keys with many versions, and merges relocate and vacuum.
func TestRunsChangeNoByte(t *testing.T) {
	for seed := range max(*modelSeeds/exhaustiveStep, 1) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 9))
			size := []int{512, 1024, 8192}[seed%3]
			w := &workload{rng: rng, m: model{}, pageSize: size, keySpace: 20 << (seed % 8), deletes: int(seed * 7 % 30)}
			s := newStore(size)
			var root Root
			runs := 0
			for range 12 {
				entries, policy, percent := w.entries(rng.IntN(300)), w.policy(), 50+rng.IntN(51)
				if a, b := []byte(w.key()), []byte(w.key()); rng.IntN(3) == 0 && bytes.Compare(a, b) < 0 && a[0] == b[0] {
					policy.Expired = Range{Lower: a, Upper: b}
				}
				expires := rng.IntN(2) == 0
				var relocate Relocation
				if rng.IntN(3) == 0 {
					relocate = Relocation{From: page.ID(len(s.used) / 2), Max: rng.IntN(20)}
				}
				var vacuum *DeadVersions
				if find := search(policy, 1+rng.IntN(20)); rng.IntN(2) == 0 && !root.Empty() {
					found, err := find.Find(t.Context(), &scribbler{s: s}, root)
					if err != nil {
						t.Fatal(err)
					}
					vacuum = found
				}
				merge := func(s *store, runMin int) *Result {
					in := s.mergeInput(root, entries, policy)
					in.DropExpired, in.Relocate, in.Vacuum = expires, relocate, vacuum
					return s.applyFilling(t, in, percent, runMin)
				}
				decoding := s.clone()
				want := merge(decoding, math.MaxInt)
				got := merge(s, 1+rng.IntN(8))
				if !maps.EqualFunc(s.pages, decoding.pages, bytes.Equal) || !maps.EqualFunc(s.values, decoding.values, bytes.Equal) {
					t.Fatal("other bytes")
				}
				if fmt.Sprint(got) != fmt.Sprint(want) {
					t.Fatalf("with runs %+v, without %+v", got.Stats, want.Stats)
				}
				root = got.Root
				runs += got.Stats.LeafPages
			}
			if runs == 0 {
				t.Error("no leaf was written: the test tests nothing")
			}
		})
	}
}

// TestRunsLeaveOutWhatHasOtherVersions: the entries from one on, up to one that is not the only version of its key in the leaf.
func TestRunsLeaveOutWhatHasOtherVersions(t *testing.T) {
	entry := func(key string, epoch keys.Epoch, kind keys.Kind, same bool) page.Entry {
		return page.Entry{Key: []byte(key), Trailer: keys.MakeTrailer(epoch, kind), Same: same}
	}
	var d page.Draft
	for _, e := range []page.Entry{
		entry("a", 1, keys.KindSet, false), entry("b", 2, keys.KindSet, false), entry("c", 9, keys.KindSet, false), entry("c", 8, keys.KindSet, true),
		entry("d", 3, keys.KindSet, false), entry("e", 4, keys.KindDelete, false), entry("f", 5, keys.KindSet, false), entry("g", 6, keys.KindSet, false),
	} {
		d.Add(&e, math.MaxInt)
	}
	p := make(page.Leaf, page.SizeMin)
	d.Build(p, 1)
	v := p.Layout()
	for _, c := range []struct{ from, to, want int }{
		{0, 8, 2}, {0, 2, 2}, {0, 1, 1}, {0, 3, 2}, {1, 8, 1}, {2, 8, 0}, {2, 3, 0}, {3, 8, 0}, {4, 8, 1}, {5, 8, 0}, {6, 8, 2}, {6, 7, 1}, {8, 8, 0},
	} {
		if got := v.SoleVersions(c.from, c.to); got != c.want {
			t.Errorf("from %d to %d: %d, want %d", c.from, c.to, got, c.want)
		}
	}
}

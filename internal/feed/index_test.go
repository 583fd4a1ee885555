package feed

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/wal"
)

// TestIndexFindsEveryWatchThatMatches adds and removes watches of points, narrow and wide ranges at random.
func TestIndexFindsEveryWatchThatMatches(t *testing.T) {
	testseed.SkipUnderRace(t)
	rng := rngOf(testseed.Base(t))
	f := New(nil, Options{manual: true})
	var live []*Watch
	for range 3000 {
		if n := rng.IntN(100); n < 50 && len(live) < 300 {
			var ranges []Range
			for range 1 + rng.IntN(3) {
				lower := rng.IntN(500)
				r := Range{fmt.Appendf(nil, "%03d", lower), fmt.Appendf(nil, "%03d", lower+1+rng.IntN(1+rng.IntN(400)))}
				if rng.IntN(3) == 0 {
					r = pointRange(r.Lower)
				}
				ranges = append(ranges, r)
			}
			wanted, err := newFilter(keys.SpaceUser, ranges, 0, 0)
			if err != nil {
				t.Fatal(err)
			}
			w := &Watch{feed: f, filter: wanted}
			f.index.add(w)
			live = append(live, w)
		} else if n < 70 && len(live) > 0 {
			i := rng.IntN(len(live))
			f.index.remove(live[i])
			live = slices.Delete(live, i, i+1)
		}
		c := commitOf(t, f, func() string { return fmt.Sprintf("%03d", rng.IntN(520)) }, 1+rng.IntN(4))
		found, _ := f.index.candidates(c, math.MaxInt)
		for _, w := range live {
			if n := len(w.match(nil, c, 0)); n > 0 && !slices.Contains(found, w) {
				t.Fatalf("%q is not found for %q", w.ranges, c.body)
			}
		}
		if slices.SortFunc(found, func(a, b *Watch) int { return slices.Index(live, a) - slices.Index(live, b) }); len(slices.Compact(found)) != len(found) {
			t.Fatal("a watch is found twice")
		}
		most := rng.IntN(20)
		if some, all := f.index.candidates(c, most); all != (len(found) <= most) || len(some) != min(len(found), most) {
			t.Fatalf("%d watches, complete %v, of %d, at most %d", len(some), all, len(found), most)
		}
	}
	for _, w := range live {
		f.index.remove(w)
	}
	if x := &f.index; len(x.exact)+len(x.intervals)+len(x.wide) != 0 {
		t.Fatalf("%d points, %d intervals, %d wide ranges are left", len(x.exact), len(x.intervals), len(x.wide))
	}
}

func commitOf(t testing.TB, f *Feed, key func() string, n int) *Commit {
	t.Helper()
	var b batch.Builder
	used := map[string]bool{}
	for range n {
		if k := key(); !used[k] {
			used[k] = true
			b.Set(keys.SpaceUser, []byte(k), nil)
		}
	}
	body, err := b.Finish()
	if err != nil {
		t.Fatal(err)
	}
	c, err := f.decode(&wal.TailRecord{Epoch: 1, Body: body.Bytes()})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

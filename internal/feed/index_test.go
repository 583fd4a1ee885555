package feed

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

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

// indexed is a watch of a range, in the index.
func indexed(t *testing.T, f *Feed, lower, upper string) *Watch {
	t.Helper()
	wanted, err := newFilter(keys.SpaceUser, []Range{{[]byte(lower), []byte(upper)}}, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	w := &Watch{feed: f, filter: wanted}
	f.index.add(w)
	return w
}

// TestIndexKeepsNoRoomForWatchesThatHaveEnded: the few that stay in an interval, or at a key, where very many were, would keep the room of all.
func TestIndexKeepsNoRoomForWatchesThatHaveEnded(t *testing.T) {
	const many = 500
	for _, within := range []int{intervalsMax / 4, intervalsMax} { // with the second number the range of the many becomes wide
		f := New(nil, Options{manual: true})
		x := &f.index
		var ended []*Watch
		for range many {
			ended = append(ended, indexed(t, f, "a", "b"), indexed(t, f, "k", "k\x00"))
		}
		stay := []*Watch{indexed(t, f, "k", "k\x00")}
		for i := range within {
			stay = append(stay, indexed(t, f, fmt.Sprintf("a%02d", i), fmt.Sprintf("a%02d5", i)))
		}
		if wide := len(x.wide); wide != 0 && wide != many || (wide == many) != (within == intervalsMax) {
			t.Fatalf("%d ranges are wide beside %d others", wide, within)
		}
		for _, w := range ended {
			x.remove(w)
		}
		lists := append(slices.Collect(maps.Values(x.exact)), x.wide)
		for _, one := range x.intervals {
			lists = append(lists, one.ranges)
		}
		for _, list := range lists {
			if cap(list) > listKept {
				t.Errorf("a list of %d ranges has room for %d, beside %d watches", len(list), cap(list), len(stay))
			}
		}
	}
}

// TestRangesBecomeWideTogether: when others have divided a range into too many intervals that very many watches have, everything else that has to
// do with watches waits for one pass over the intervals, and not for one of each watch.
func TestRangesBecomeWideTogether(t *testing.T) {
	const many, passes, attempts = 8000, 60, 5
	attempt := func() (took, pass time.Duration) {
		f := New(nil, Options{manual: true})
		x := &f.index
		for range many {
			indexed(t, f, "a", "b")
		}
		for i := 0; len(x.wide) == 0; i++ {
			began := time.Now()
			for k := range x.intervals {
				x.intervals[k].ranges = slices.DeleteFunc(x.intervals[k].ranges, func(e *entry) bool { return e.wide })
			}
			pass = time.Since(began)
			began = time.Now()
			indexed(t, f, fmt.Sprintf("a%02d", i), fmt.Sprintf("a%02d5", i))
			took = time.Since(began)
		}
		if len(x.wide) != many || len(x.divided) != 0 {
			t.Fatalf("%d of %d ranges are wide, %d are to become so", len(x.wide), many, len(x.divided))
		}
		return took, pass
	}
	for n := 1; ; n++ { // a busy machine may hold up one of the two
		took, pass := attempt()
		if took <= passes*pass {
			return
		}
		if n == attempts {
			t.Fatalf("a watch that divides a range of %d others takes %v; a pass over the intervals takes %v", many, took, pass)
		}
	}
}

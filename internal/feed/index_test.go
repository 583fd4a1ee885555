package feed

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
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
			wanted, err := newFilter(keys.SpaceUser, ranges, Kinds(rng.IntN(4)), Origins(rng.IntN(3)))
			if err != nil {
				t.Fatal(err)
			}
			f.lastID++
			w := &Watch{ID: f.lastID, feed: f, filter: wanted}
			f.watches[w.ID] = w
			f.index.add(w)
			live = append(live, w)
		} else if n < 70 && len(live) > 0 {
			i := rng.IntN(len(live))
			f.index.remove(live[i])
			delete(f.watches, live[i].ID)
			live = slices.Delete(live, i, i+1)
		} else if n < 90 && len(live) > 0 {
			if w := live[rng.IntN(len(live))]; w.state == StateLive {
				f.index.demote(w)
				w.state = StateLagging
			} else {
				f.index.promote(w)
				w.state = StateLive
			}
		}
		checkIndex(t, &f.index, live)
		c := mixedCommitOf(t, f, rng, func() string { return fmt.Sprintf("%03d", rng.IntN(520)) }, 1+rng.IntN(4))
		offered := slices.Clone(f.candidatesLocked(c))
		found, _ := f.index.candidates(c, false, math.MaxInt)
		if n := len(offered); n != len(slices.DeleteFunc(slices.Clone(found), func(w *Watch) bool { return w.state != StateLive })) {
			t.Fatalf("%d live watches are found", n)
		}
		for _, w := range live {
			if n := len(w.match(nil, c, 0)); n > 0 && !slices.Contains(found, w) {
				t.Fatalf("%q is not found for %q", w.ranges, c.body)
			}
			if !w.wants(c.Origin, c.kinds()) && slices.Contains(found, w) {
				t.Fatalf("%q is found for %q, of which it wants nothing", w.ranges, c.body)
			}
		}
		if slices.SortFunc(found, func(a, b *Watch) int { return slices.Index(live, a) - slices.Index(live, b) }); len(slices.Compact(found)) != len(found) {
			t.Fatal("a watch is found twice")
		}
		most := rng.IntN(20)
		if some, all := f.index.candidates(c, false, most); all != (len(found) <= most) || len(some) != min(len(found), most) {
			t.Fatalf("%d watches, complete %v, of %d, at most %d", len(some), all, len(found), most)
		}
	}
	for _, w := range live {
		f.index.remove(w)
	}
	if x := &f.index; len(x.exact)+x.intervals.Len()+x.wide.count() != 0 || x.first.next != nil {
		t.Fatalf("%d points, %d intervals, %d wide ranges are left", len(x.exact), x.intervals.Len(), x.wide.count())
	}
}

// checkIndex compares the intervals, their bounds and their ranges with what the watches make of them.
func checkIndex(t *testing.T, x *index, live []*Watch) {
	t.Helper()
	bounds, covered := map[string]int{}, map[*indexRange]int32{}
	for _, w := range live {
		for i := range w.entries {
			e := &w.entries[i]
			if e.in.entries[e.place] != e || e.place < e.in.live != (w.state == StateLive) {
				t.Fatalf("%q is not at its place", w.ranges[i])
			}
			if in := e.in.of; in.from != nil && covered[in] == 0 {
				bounds[string(in.from.lower)]++
				bounds[string(in.to.lower)]++
				for at := in.from; at != in.to; at = at.next {
					if covered[in]++; !slices.Contains(at.ranges, in) {
						t.Fatalf("%q is not in the interval of %q", w.ranges[i], at.lower)
					}
				}
				if covered[in] != in.intervals || in.intervals > in.most || !bytes.Equal(in.from.lower, w.ranges[i].Lower) || !bytes.Equal(in.to.lower, w.ranges[i].Upper) {
					t.Fatalf("%q covers %d intervals, counted as %d, at most %d", w.ranges[i], covered[in], in.intervals, in.most)
				}
			}
		}
	}
	places := 0
	for _, n := range covered {
		places += int(n)
	}
	n := 0
	for at := x.first.next; at != nil; at = at.next {
		if n++; at.previous.next != at || bytes.Compare(at.previous.lower, at.lower) >= 0 || at.bounds != bounds[string(at.lower)] || x.locate(at.lower) != at {
			t.Fatalf("the interval of %q has %d bounds of %d, or is not at its place", at.lower, at.bounds, bounds[string(at.lower)])
		}
	}
	if all, _ := x.places(); n != len(bounds) || n != x.intervals.Len() || all != places || len(x.divided) != 0 {
		t.Fatalf("%d intervals, %d in the tree, of %d bounds; %d places of %d; %d divided", n, x.intervals.Len(), len(bounds), all, places, len(x.divided))
	}
}

// mixedCommitOf is commitOf with deletions and other origins.
func mixedCommitOf(t testing.TB, f *Feed, rng *rand.Rand, key func() string, n int) *Commit {
	t.Helper()
	return commitWith(t, f, batch.Origin(rng.IntN(2)), func() bool { return rng.IntN(2) == 0 }, key, n)
}

func commitWith(t testing.TB, f *Feed, o batch.Origin, deletes func() bool, key func() string, n int) *Commit {
	t.Helper()
	var b batch.Builder
	b.SetHeader(batch.Header{Origin: o})
	used := map[string]bool{}
	for range n {
		switch k := key(); {
		case used[k]:
			continue
		case deletes():
			b.Delete(keys.SpaceUser, []byte(k))
			used[k] = true
		default:
			b.Set(keys.SpaceUser, []byte(k), nil)
			used[k] = true
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

// count is the number of entries of a range, and room is for how many there is room.
func (r *indexRange) count() (n int) {
	for _, in := range r.classes {
		n += len(in.entries)
	}
	return n
}

func (r *indexRange) room() (n int) {
	for _, in := range r.classes {
		n += cap(in.entries)
	}
	return n + cap(r.classes)
}

// indexed is a watch of some ranges, by their bounds, in the index.
func indexed(t *testing.T, f *Feed, bounds ...string) *Watch {
	t.Helper()
	var ranges []Range
	for pair := range slices.Chunk(bounds, 2) {
		ranges = append(ranges, Range{[]byte(pair[0]), []byte(pair[1])})
	}
	wanted, err := newFilter(keys.SpaceUser, ranges, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	w := &Watch{feed: f, filter: wanted}
	f.index.add(w)
	return w
}

// TestWatchesThatWantNothingOfACommitAreNotAsked: everybody else's watches wait for those that are asked. Queues of these never fill, so that they
// are never set aside.
func TestWatchesThatWantNothingOfACommitAreNotAsked(t *testing.T) {
	const many = 100
	f := New(nil, Options{manual: true})
	whole, point, narrow := Range{}, pointRange([]byte("k")), Range{[]byte("a"), []byte("z")}
	for _, r := range []Range{whole, point, narrow} {
		for _, wanted := range []class{{0, OriginsOf(batch.OriginLease)}, {KindDeletes, 0}, {KindLoads, 0}, {0, 0}} {
			for range many {
				one, err := newFilter(keys.SpaceUser, []Range{r}, wanted.kinds, wanted.origins)
				if err != nil {
					t.Fatal(err)
				}
				f.index.add(&Watch{feed: f, filter: one})
			}
		}
	}
	for i := range 2 * intervalsMax { // the whole space covers more than it may
		indexed(t, f, fmt.Sprintf("z%03d", i), fmt.Sprintf("z%03d~", i))
	}
	if f.index.wide.count() != 4*many {
		t.Fatalf("%d ranges are wide", f.index.wide.count())
	}
	key := func() string { return "k" }
	for _, one := range []struct {
		origin  batch.Origin
		deletes bool
		classes int
	}{{batch.OriginClient, false, 1}, {batch.OriginClient, true, 2}, {batch.OriginLease, false, 2}, {batch.OriginLease, true, 3}} {
		c := commitWith(t, f, one.origin, func() bool { return one.deletes }, key, 1)
		if found, _ := f.index.candidates(c, true, math.MaxInt); len(found) != 3*one.classes*many {
			t.Errorf("%d watches are asked about a commit of origin %d, deletes %v, of %d that may want it", len(found), one.origin, one.deletes, 3*one.classes*many)
		}
	}
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
		if wide := x.wide.count(); wide != 0 && wide != many || (wide == many) != (within == intervalsMax) {
			t.Fatalf("%d ranges are wide beside %d others", wide, within)
		}
		for _, w := range ended {
			x.remove(w)
		}
		kept := func(what string, length, room int) {
			if room > listKept {
				t.Errorf("%s of %d has room for %d, beside %d watches", what, length, room, len(stay))
			}
		}
		kept("the list of wide ranges", x.wide.count(), x.wide.room())
		for _, in := range x.exact {
			kept("the list of a key", in.count(), in.room())
		}
		for one := x.first.next; one != nil; one = one.next {
			kept("an interval", len(one.ranges), cap(one.ranges))
			for _, in := range one.ranges {
				kept("the list of a range", in.count(), in.room())
			}
		}
	}
}

// places are those of ranges in the intervals, and the most of one interval, in which the end of a watch may search.
func (x *index) places() (all, longest int) {
	for one := x.first.next; one != nil; one = one.next {
		all, longest = all+len(one.ranges), max(longest, len(one.ranges))
	}
	return all, longest
}

// TestEqualRangesHaveThePlacesOfOne: everything that has to do with watches waits while one that ends is searched in its intervals, and so it does
// while ranges that others have divided become wide, very many of which may be equal.
func TestEqualRangesHaveThePlacesOfOne(t *testing.T) {
	const many, ranges = 200, 8
	f := New(nil, Options{manual: true})
	x := &f.index
	var bounds []string
	for i := range ranges {
		bounds = append(bounds, fmt.Sprintf("%02d", i), fmt.Sprintf("%02d~", i))
	}
	var ending []*Watch
	for range many {
		ending = append(ending, indexed(t, f, bounds...))
	}
	pieces := 0
	for ; x.wide.count() == 0; pieces++ {
		if all, longest := x.places(); all > 2*(ranges*intervalsMax+pieces) || longest > 2 {
			t.Fatalf("%d equal watches and %d others have %d places in intervals, %d in one", many, pieces, all, longest)
		}
		indexed(t, f, fmt.Sprintf("%02da%03d", pieces%ranges, pieces), fmt.Sprintf("%02da%03d5", pieces%ranges, pieces))
	}
	if x.wide.count() != many || pieces < ranges*(intervalsMax/2-1) || len(x.divided) != 0 {
		t.Fatalf("%d ranges are wide of %d watches after %d others, %d are to become so", x.wide.count(), many, pieces, len(x.divided))
	}
	for _, w := range ending {
		x.remove(w)
	}
	if all, _ := x.places(); all != pieces || x.wide.count() != 0 {
		t.Fatalf("%d places and %d wide ranges are left, with %d watches", all, x.wide.count(), pieces)
	}
}

// TestPlacesOfAWatchHaveABound: ranges that differ from each other have places of their own, and a watch may have many ranges.
func TestPlacesOfAWatchHaveABound(t *testing.T) {
	const each, ranges = 15, 32
	f := New(nil, Options{manual: true})
	for lower := range each {
		for upper := range each {
			var bounds []string
			for i := range ranges {
				bounds = append(bounds, fmt.Sprintf("%02da%02d", i, lower), fmt.Sprintf("%02db%02d", i, upper))
			}
			indexed(t, f, bounds...)
		}
	}
	for i := range ranges { // they divide each range
		for p := range intervalsMax/2 - each {
			indexed(t, f, fmt.Sprintf("%02da~%02d", i, p), fmt.Sprintf("%02da~%02d5", i, p))
		}
	}
	if all, _ := f.index.places(); all > each*each*watchIntervalsMax+ranges*intervalsMax {
		t.Errorf("%d watches have %d places in intervals", each*each, all)
	}
}

// TestBoundsOfVeryManyRangesAreAddedFast: all other watches wait meanwhile. In a sorted list each bound moves those after it: these ranges took
// a minute.
func TestBoundsOfVeryManyRangesAreAddedFast(t *testing.T) {
	testseed.SkipUnderRace(t)
	const watches, ranges = 800, 64
	f := New(nil, Options{manual: true})
	begun := time.Now()
	for i := range watches {
		var bounds []string
		for r := range ranges {
			lower := (watches-i)*ranges + r
			bounds = append(bounds, fmt.Sprintf("%07d", lower), fmt.Sprintf("%07d~", lower))
		}
		indexed(t, f, bounds...)
	}
	if n := f.index.intervals.Len(); n != 2*watches*ranges || f.index.wide.count() != 0 {
		t.Fatalf("%d intervals, %d wide", n, f.index.wide.count())
	}
	if took := time.Since(begun); took > 10*time.Second {
		t.Errorf("%d watches of %d ranges took %v", watches, ranges, took)
	}
}

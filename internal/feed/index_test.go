package feed

import (
	"bytes"
	"cmp"
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

// TestIndexFindsEveryWatchThatMatches compares the index with a look at each watch, while watches of keys, and of narrow and wide ranges, are
// added and removed, become live and lag. There are few bounds, so that many ranges are equal, begin together, or end together.
func TestIndexFindsEveryWatchThatMatches(t *testing.T) {
	testseed.SkipUnderRace(t)
	for _, bounds := range []int{4, 10, 500} {
		t.Run(fmt.Sprint(bounds), func(t *testing.T) { runIndexModel(t, bounds) })
	}
}

func runIndexModel(t *testing.T, bounds int) {
	rng := rngOf(testseed.Base(t))
	f := New(nil, Options{manual: true})
	var live []*Watch
	key := func() string { return fmt.Sprintf("%03d", rng.IntN(bounds+20)) }
	for range 3000 {
		if n := rng.IntN(100); n < 50 && len(live) < 300 {
			live = append(live, indexedAtRandom(t, f, rng, bounds))
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
		checkFound(t, f, rng, mixedCommitOf(t, f, rng, key, 1+rng.IntN(4)), live)
	}
	for _, w := range live {
		f.index.remove(w)
	}
	if x := &f.index; len(x.points)+len(x.trees) != 0 {
		t.Fatalf("%d keys and %d trees are left", len(x.points), len(x.trees))
	}
}

func indexedAtRandom(t *testing.T, f *Feed, rng *rand.Rand, bounds int) *Watch {
	t.Helper()
	var ranges []Range
	for range 1 + rng.IntN(3) {
		lower := rng.IntN(bounds)
		r := Range{fmt.Appendf(nil, "%03d", lower), fmt.Appendf(nil, "%03d", lower+1+rng.IntN(1+rng.IntN(bounds)))}
		if rng.IntN(3) == 0 {
			r = pointRange(r.Lower)
		}
		ranges = append(ranges, r)
	}
	wanted, err := newFilter(keys.SpaceUser, ranges, Kinds(rng.IntN(8)), Origins(rng.IntN(3)))
	if err != nil {
		t.Fatal(err)
	}
	f.lastID++
	w := &Watch{ID: f.lastID, feed: f, filter: wanted}
	w.state = State(rng.IntN(2))
	f.watches[w.ID] = w
	f.index.add(w)
	return w
}

// checkFound compares what the index finds for a commit with the watches that want something of it. It finds no others, but for watches that
// want another kind of operations than those in their ranges.
func checkFound(t *testing.T, f *Feed, rng *rand.Rand, c *Commit, live []*Watch) {
	t.Helper()
	offered := slices.Clone(f.candidatesLocked(c))
	found, _ := f.index.candidates(c, false, math.MaxInt)
	found = slices.Clone(found)
	for _, w := range live {
		everything := filter{ranges: w.ranges, class: class{kinds: kindsAll}}
		want := w.wants(c.Origin, c.kinds()) && len(everything.match(nil, c, 0)) > 0
		if is := slices.Contains(found, w); is != want || len(w.match(nil, c, 0)) > 0 && !want {
			t.Fatalf("%q, %v, is found for %q: %v", w.ranges, w.class, c.body, is)
		}
		if is := slices.Contains(offered, w); is != (want && w.state == StateLive) {
			t.Fatalf("%q in state %v is offered %q: %v", w.ranges, w.state, c.body, is)
		}
	}
	for _, list := range [][]*Watch{found, offered} {
		if slices.SortFunc(list, func(a, b *Watch) int { return cmp.Compare(a.ID, b.ID) }); len(slices.Compact(slices.Clone(list))) != len(list) {
			t.Fatal("a watch is found twice")
		}
	}
	most := rng.IntN(20)
	if some, all := f.index.candidates(c, false, most); all != (len(found) <= most) || len(some) != min(len(found), most) {
		t.Fatalf("%d watches, complete %v, of %d, at most %d", len(some), all, len(found), most)
	}
}

// checkIndex checks that each entry is at its place, and each node, and nothing else is there.
func checkIndex(t *testing.T, x *index, live []*Watch) {
	t.Helper()
	used := map[*holders]int{}
	for _, w := range live {
		for i := range w.entries {
			e := &w.entries[i]
			if used[e.in]++; e.in.entries[e.place] != e || e.place < e.in.live != (w.state == StateLive) {
				t.Fatalf("%q is not at its place", w.ranges[i])
			}
			if n := e.in.node; (n == nil) != w.ranges[i].isPoint() || n != nil && n.compare(&w.ranges[i]) != 0 {
				t.Fatalf("%q is at the place of another range", w.ranges[i])
			}
			if e.in.origins != w.origins || e.in.kinds != w.kinds&kindOperations {
				t.Fatalf("%v is among watches that want %v", w.class, e.in.class)
			}
		}
	}
	places := 0
	for key, all := range x.points {
		for _, in := range all {
			if places++; used[in] != len(in.entries) || used[in] == 0 {
				t.Fatalf("%d watches of %q of %d", len(in.entries), key, used[in])
			}
		}
	}
	for _, tree := range x.trees {
		for _, n := range checkTree(t, tree) {
			if places++; used[&n.holders] != len(n.entries) || used[&n.holders] == 0 {
				t.Fatalf("%d watches of %q of %d", len(n.entries), n.Range, used[&n.holders])
			}
		}
	}
	if places != len(used) {
		t.Fatalf("%d places of %d", places, len(used))
	}
}

// checkTree checks the invariants of a tree, and returns its nodes in their order.
func checkTree(t *testing.T, all *tree) (nodes []*node) {
	t.Helper()
	var walk func(n, up *node)
	walk = func(n, up *node) {
		if n == nil {
			return
		}
		from := len(nodes)
		walk(n.left, n)
		nodes = append(nodes, n)
		walk(n.right, n)
		var last, lastLive []byte
		for _, below := range nodes[from:] {
			if bytes.Compare(last, below.Upper) < 0 {
				last = below.Upper
			}
			if below.live > 0 && bytes.Compare(lastLive, below.Upper) < 0 {
				lastLive = below.Upper
			}
			if below.rank > n.rank {
				t.Fatalf("%q is below %q", below.Range, n.Range)
			}
		}
		if n.up != up || n.holders.node != n || n.class != all.class || !bytes.Equal(n.last, last) {
			t.Fatalf("%+v is in the wrong place, or does not know that %q ends last", n, last)
		}
		if !bytes.Equal(n.lastLive, lastLive) {
			t.Fatalf("%+v does not know that %q ends last of those with live watches", n, lastLive)
		}
		memory := func(bound []byte) bool {
			return bound == nil || slices.ContainsFunc(nodes[from:], func(below *node) bool { return &below.Upper[0] == &bound[0] })
		}
		if !memory(n.last) || !memory(n.lastLive) {
			t.Fatalf("%+v keeps a bound of a range that is not below it", n)
		}
	}
	walk(all.root, nil)
	if !slices.IsSortedFunc(nodes, func(a, b *node) int { return a.compare(&b.Range) }) {
		t.Fatal("the ranges are not in their order")
	}
	return nodes
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

// TestFewRangesAreLookedAt: the tailer, and so all other watches, wait for it. A search looks at those that it finds, and at some for each
// key and each time that the number of ranges doubles, whatever ranges there are and in which order they came.
func TestFewRangesAreLookedAt(t *testing.T) {
	testseed.SkipUnderRace(t)
	const many = 20_000
	at := func(format string) func(i int) Range {
		return func(i int) Range { return Range{fmt.Appendf(nil, format, i), []byte("zzz")} }
	}
	for _, one := range []struct {
		name  string
		class class
		at    func(i int) Range
		finds int // for a commit of k/05000, at most
	}{
		{"after the key", class{}, at("zz/%05d"), 0},
		{"before the key", class{}, func(i int) Range { return Range{[]byte("a"), fmt.Appendf(nil, "b%05d", i)} }, 0},
		{"nested around the key", class{}, func(i int) Range { return Range{fmt.Appendf(nil, "a%05d", i), fmt.Appendf(nil, "z%05d", many-i)} }, many},
		{"nested beside the key", class{}, func(i int) Range { return Range{fmt.Appendf(nil, "a%05d", i), fmt.Appendf(nil, "b%05d", many-i)} }, 0},
		{"around the key, of another origin", class{origins: OriginsOf(batch.OriginLease)}, at("a%05d"), 0},
		{"around the key, of another kind", class{kinds: KindDeletes}, at("a%05d"), 0},
		{"that begin at the key", class{}, func(i int) Range { return Range{[]byte("k/05000"), fmt.Appendf(nil, "z%05d", i)} }, many},
		{"that begin after the key", class{}, func(i int) Range { return Range{[]byte("k/05001"), fmt.Appendf(nil, "z%05d", i)} }, 0},
		{"apart", class{}, func(i int) Range { return Range{fmt.Appendf(nil, "k/%05d", i), fmt.Appendf(nil, "k/%05d~", i)} }, 1},
		{"with the key where they end", class{}, func(i int) Range { return Range{fmt.Appendf(nil, "a/%05d", i), []byte("k/05000")} }, 0},
		{"one of them wide", class{}, func(i int) Range {
			if i == 0 {
				return Range{}
			}
			return Range{fmt.Appendf(nil, "a/%05d", i), fmt.Appendf(nil, "a/%05d~", i)}
		}, 1},
	} {
		t.Run(one.name, func(t *testing.T) {
			f := New(nil, Options{manual: true})
			var all []*Watch
			for i := range many {
				wanted, err := newFilter(keys.SpaceUser, []Range{one.at(i)}, one.class.kinds, one.class.origins)
				if err != nil {
					t.Fatal(err)
				}
				w := &Watch{feed: f, filter: wanted}
				f.index.add(w)
				all = append(all, w)
			}
			c := commitWith(t, f, batch.OriginClient, func() bool { return false }, func() string { return "k/05000" }, 1)
			looksAt := func(live bool, finds int) {
				t.Helper()
				found, _ := f.index.candidates(c, live, math.MaxInt)
				if most := 4*finds + deepest(many); len(found) != finds || f.index.looked > most {
					t.Errorf("%d of %d ranges are looked at, at most %d; %d are found, of %d", f.index.looked, many, most, len(found), finds)
				}
			}
			looksAt(true, one.finds)
			for _, w := range all[1:] {
				f.index.demote(w)
				w.state = StateLagging
			}
			looksAt(false, one.finds)
			looksAt(true, min(one.finds, len(liveThat(all, c))))
		})
	}
}

// deepest is a depth that no tree of so many nodes has: 12 times the logarithm, which chance reaches once in 10^20 trees.
func deepest(nodes int) int { return 12 * int(math.Log(float64(nodes))) }

func liveThat(all []*Watch, c *Commit) (list []*Watch) {
	for _, w := range all {
		if w.state == StateLive && len(w.match(nil, c, 0)) > 0 {
			list = append(list, w)
		}
	}
	return list
}

// TestRangesThatEndBeforeAKeyArePassedBy: without that a search looks at two times as many, and more.
func TestRangesThatEndBeforeAKeyArePassedBy(t *testing.T) {
	testseed.SkipUnderRace(t)
	const many, each, searches = 20_000, 100, 100
	apart, some := New(nil, Options{manual: true}), New(nil, Options{manual: true})
	for i := range many {
		lower, upper := fmt.Sprintf("k%05d", i), fmt.Sprintf("k%05d~", i)
		if indexed(t, apart, lower, upper); i%each == 0 {
			upper = "z"
		}
		indexed(t, some, lower, upper)
	}
	search := func(f *Feed, key string, finds int) int {
		c := commitWith(t, f, batch.OriginClient, func() bool { return false }, func() string { return key }, 1)
		if found, _ := f.index.candidates(c, true, math.MaxInt); len(found) != finds {
			t.Fatalf("%d are found for %q, of %d", len(found), key, finds)
		}
		return f.index.looked
	}
	looked := 0
	for i := range searches {
		looked += search(apart, fmt.Sprintf("k%05d~~", i*many/searches), 0)
	}
	if most := 4 * searches * int(math.Log(many)); looked > most {
		t.Errorf("%d searches look at %d of %d ranges, of which they find none; at most %d", searches, looked, many, most)
	}
	if looked, most := search(some, "l", many/each), 12*many/each; looked > most {
		t.Errorf("a search looks at %d of %d ranges, of which it finds %d; at most %d", looked, many, many/each, most)
	}
}

// TestFewRangesAreLookedAtForACommitOfManyKeys: ranges between its keys are passed by, and one that has several keys is looked at once.
func TestFewRangesAreLookedAtForACommitOfManyKeys(t *testing.T) {
	testseed.SkipUnderRace(t)
	const many, operations = 20_000, 50
	f := New(nil, Options{manual: true})
	for i := range many {
		indexed(t, f, fmt.Sprintf("k%05d", i), fmt.Sprintf("k%05d~", i))
	}
	for i := range operations {
		indexed(t, f, fmt.Sprintf("a%05d", i), fmt.Sprintf("z%05d", i))
	}
	next := 0
	c := commitWith(t, f, 0, func() bool { return false }, func() string { next += many / operations; return fmt.Sprintf("k%05d~", next) }, operations)
	found, _ := f.index.candidates(c, true, math.MaxInt)
	if most := 2 * operations * deepest(many) / 4; len(found) != operations || f.index.looked > most {
		t.Errorf("%d of %d ranges are looked at, at most %d; %d are found, of %d", f.index.looked, many, most, len(found), operations)
	}
}

// TestIndexKeepsNoRoomForWatchesThatHaveEnded: the few that stay at a range, or at a key, where very many were, would keep the room of all.
func TestIndexKeepsNoRoomForWatchesThatHaveEnded(t *testing.T) {
	const many = 500
	f := New(nil, Options{manual: true})
	x := &f.index
	var ended []*Watch
	for range many {
		ended = append(ended, indexed(t, f, "a", "b"), indexed(t, f, "k", "k\x00"))
	}
	for i := range many { // of a key, with all classes
		wanted, err := newFilter(keys.SpaceUser, []Range{pointRange([]byte("k")), {[]byte("n"), []byte("o")}}, 0, Origins(1+i))
		if err != nil {
			t.Fatal(err)
		}
		w := &Watch{feed: f, filter: wanted}
		x.add(w)
		ended = append(ended, w)
	}
	indexed(t, f, "k", "k\x00")
	indexed(t, f, "a", "b")
	if len(x.trees) != 1+many {
		t.Fatalf("%d trees", len(x.trees))
	}
	for _, w := range ended {
		x.remove(w)
	}
	kept := func(what string, length, room, want int) {
		if length != want || room > listKept {
			t.Errorf("%s of %d, not %d, has room for %d", what, length, want, room)
		}
	}
	kept("the list of trees", len(x.trees), cap(x.trees), 1)
	kept("the list of a range", len(x.trees[0].root.entries), cap(x.trees[0].root.entries), 1)
	for _, all := range x.points {
		kept("the list of a key", len(all), cap(all), 1)
		kept("the list of a class", len(all[0].entries), cap(all[0].entries), 1)
	}
}

// TestIndexKeepsNoBoundOfARangeThatHasEnded: a bound may be long, and ranges that end at equal ones take turns.
func TestIndexKeepsNoBoundOfARangeThatHasEnded(t *testing.T) {
	rng := rngOf(testseed.Base(t))
	f := New(nil, Options{manual: true})
	var watches [12]*Watch
	for range 20_000 {
		i := rng.IntN(len(watches))
		switch w := watches[i]; {
		case w == nil:
			watches[i] = indexed(t, f, fmt.Sprintf("a%02d", i), []string{"zz", "z", "z"}[i%3])
		case rng.IntN(2) == 0:
			f.index.remove(w)
			watches[i] = nil
		case w.state == StateLive:
			f.index.demote(w)
			w.state = StateLagging
		default:
			f.index.promote(w)
			w.state = StateLive
		}
		for _, tree := range f.index.trees {
			checkTree(t, tree)
		}
	}
}

// TestEqualRangesHaveThePlacesOfOne: a range of very many watches is one place, which those that begin and end share, and so does one that each
// of these has in addition.
func TestEqualRangesHaveThePlacesOfOne(t *testing.T) {
	const many, ranges, pieces = 200, 8, 500
	f := New(nil, Options{manual: true})
	var bounds []string
	for i := range ranges {
		bounds = append(bounds, fmt.Sprintf("%02d", i), fmt.Sprintf("%02d~", i))
	}
	var ending []*Watch
	for range many {
		ending = append(ending, indexed(t, f, bounds...))
	}
	for i := range pieces {
		indexed(t, f, fmt.Sprintf("%02da%03d", i%ranges, i), fmt.Sprintf("%02da%03d5", i%ranges, i))
	}
	if n := len(checkTree(t, f.index.trees[0])); n != ranges+pieces {
		t.Fatalf("%d equal watches of %d ranges and %d others have %d places", many, ranges, pieces, n)
	}
	for _, w := range ending {
		f.index.remove(w)
	}
	if n := len(checkTree(t, f.index.trees[0])); n != pieces {
		t.Fatalf("%d places are left, with %d watches", n, pieces)
	}
}

// TestPlacesOfAWatchHaveABound: a watch has a place for each of its ranges, however others divide them.
func TestPlacesOfAWatchHaveABound(t *testing.T) {
	const each, ranges = 15, 32
	f := New(nil, Options{manual: true})
	for lower := range each {
		for upper := range each {
			var bounds []string
			for i := range ranges {
				bounds = append(bounds, fmt.Sprintf("%02da%02d", i, lower), fmt.Sprintf("%02db%02d", i, upper))
			}
			if w := indexed(t, f, bounds...); len(w.entries) != ranges {
				t.Fatalf("%d entries", len(w.entries))
			}
		}
	}
	if n := len(checkTree(t, f.index.trees[0])); n != each*each*ranges {
		t.Errorf("%d watches have %d places", each*each, n)
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
	took := time.Since(begun)
	if n := len(checkTree(t, f.index.trees[0])); n != watches*ranges {
		t.Fatalf("%d ranges", n)
	}
	if took > 10*time.Second {
		t.Errorf("%d watches of %d ranges took %v", watches, ranges, took)
	}
}

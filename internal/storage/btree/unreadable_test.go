package btree

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

var unreadableSeeds = flag.Int("unreadable.seeds", 40, "runs of the test of merges over damaged pages")

var errBad = errors.New("bad page")

// badSource cannot read some pages.
type badSource struct {
	Source
	bad map[page.ID]struct{}
}

func (b badSource) Page(id page.ID, level int) ([]byte, error) {
	if _, bad := b.bad[id]; bad {
		return nil, fmt.Errorf("page %d: %w", id, errBad)
	}
	return b.Source.Page(id, level)
}

// damaged is a workload over a tree of which some pages cannot be read, and the repair tree with
// what was merged meanwhile.
type damaged struct {
	*workload
	s                *store
	root, repairTree Root
	bad              map[page.ID]struct{}
	skipped          []UnreadablePage
	avoid            Avoided
	onMerge          func(*MergeInput, *Result) // nil for nothing
}

// in is a merge that meets the bad pages.
func (d *damaged) in(base Root, entries []Entry, p Policy) *MergeInput {
	in := d.s.mergeInput(base, entries, p)
	in.Source = func() Source { return badSource{&scribbler{s: d.s}, d.bad} }
	in.Unreadable = func(err error) bool { return errors.Is(err, errBad) }
	in.Avoid = d.avoid
	return in
}

func (d *damaged) covers(key []byte, t keys.Trailer) bool {
	return slices.ContainsFunc(d.skipped, func(p UnreadablePage) bool {
		return p.Lower.Compare(key, t) <= 0 && (p.Upper == nil || p.Upper.Compare(key, t) > 0)
	})
}

// attempt merges, and leaves no trace if that fails.
func (d *damaged) attempt(t *testing.T, in *MergeInput) (*Result, error) {
	t.Helper()
	pages, used, values, ref := maps.Clone(d.s.pages), slices.Clone(d.s.used), maps.Clone(d.s.values), d.s.nextRef
	res, err := Merge(context.Background(), in)
	if err != nil {
		d.s.pages, d.s.used, d.s.values, d.s.nextRef = pages, used, values, ref
		return nil, err
	}
	return d.s.replace(t, func() (*Result, error) { return res, nil }), nil
}

// step merges entries: those for skipped pages into the repair tree, and the others into the tree.
func (d *damaged) step(t *testing.T, entries []Entry, configure func(*MergeInput)) {
	t.Helper()
	policy := d.policy()
	prepare := func(entries []Entry) *MergeInput {
		in := d.in(d.root, entries, policy)
		configure(in)
		return in
	}
	known := slices.Clone(d.skipped)
	outside := func() []Entry {
		return slices.DeleteFunc(slices.Clone(entries), func(e Entry) bool { return d.covers(e.Key, e.Trailer) })
	}
	in := prepare(outside())
	res, err := d.attempt(t, in)
	var found *UnreadableError
	if errors.As(err, &found) {
		d.checkUnreadable(t, found, prepare(outside()))
		d.skipped = slices.DeleteFunc(d.skipped, func(p UnreadablePage) bool {
			return slices.ContainsFunc(found.Pages, func(q UnreadablePage) bool { return q.ID == p.ID })
		})
		d.skipped = append(d.skipped, found.Pages...)
		d.avoid = maps.Clone(d.avoid)
		for _, p := range found.Pages {
			d.avoid[p.ID] = p.Upper
		}
		in = prepare(outside())
		res, err = d.attempt(t, in)
	}
	if err != nil {
		t.Fatalf("with %d pages skipped, %d before: %v", len(d.skipped), len(known), err)
	}
	d.root = res.Root
	if d.onMerge != nil {
		d.onMerge(in, res)
	}
	inside := slices.DeleteFunc(slices.Clone(entries), func(e Entry) bool { return !d.covers(e.Key, e.Trailer) })
	in = d.s.mergeInput(d.repairTree, inside, policy)
	in.Policy.RetainTombstones = true
	d.repairTree = d.s.apply(t, in).Root
}

// checkUnreadable: what a merge could not read is bad indeed, and any number of workers finds the
// same.
func (d *damaged) checkUnreadable(t *testing.T, found *UnreadableError, in *MergeInput) {
	t.Helper()
	for _, p := range found.Pages {
		if _, bad := d.bad[p.ID]; !bad {
			t.Fatalf("page %d is sound", p.ID)
		}
	}
	workers := 3 - in.Workers()%2
	in.Workers = Always(workers)
	var again *UnreadableError
	if _, err := d.attempt(t, in); !errors.As(err, &again) || !slices.EqualFunc(found.Pages, again.Pages, sameLoss) {
		t.Fatalf("with %d workers: %v; before: %v", workers, err, found)
	}
}

func sameLoss(a, b UnreadablePage) bool {
	return a.ID == b.ID && a.Level == b.Level && a.Lower.String() == b.Lower.String() && fmt.Sprint(a.Upper) == fmt.Sprint(b.Upper)
}

// compare reads every key at every snapshot: for keys of skipped pages first in the repair tree,
// and then in the tree. With the pages readable again every answer is right; with them bad it is
// right or an error.
func (d *damaged) compare(t *testing.T, live []keys.Epoch) (refused int) {
	t.Helper()
	for k := range d.m {
		for _, e := range append([]keys.Epoch{d.frontier, d.epoch, keys.MaxEpoch}, live...) {
			if d.records.lost(k, e, d.frontier) {
				continue
			}
			want, ok := d.m.at(k, e)
			alive := ok && want.kind.HasValue()
			for _, src := range []Source{d.s, badSource{d.s, d.bad}} {
				got, found, err := d.get(src, []byte(k), e)
				if errors.Is(err, errBad) && src != Source(d.s) {
					refused++
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				if found && (got.Epoch != want.epoch || got.Kind != want.kind || string(d.s.value(t, got)) != string(want.value)) || !found && alive {
					t.Fatalf("get(%q, %d) = %d %v, want %d %v", k, e, got.Epoch, found, want.epoch, ok)
				}
			}
		}
	}
	return refused
}

func (d *damaged) get(src Source, key []byte, at keys.Epoch) (Version, bool, error) {
	if d.covers(key, newestBefore(at)) {
		if v, ok, err := Get(d.s, d.repairTree, key, at); ok || err != nil {
			return v, ok, err
		}
	}
	return Get(src, d.root, key, at)
}

// checkSkipped: skipped pages are where they were, between the same separators.
func (d *damaged) checkSkipped(t *testing.T) {
	t.Helper()
	found := 0
	root := page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: d.root.ID}
	d.places(t, root, d.root.Level, nil, &found)
	if found != len(d.skipped) {
		t.Fatalf("of %d skipped pages %d are in the tree", len(d.skipped), found)
	}
}

func (d *damaged) places(t *testing.T, c page.Child, level int, upper *page.Separator, found *int) {
	t.Helper()
	i := slices.IndexFunc(d.skipped, func(p UnreadablePage) bool { return p.ID == c.ID })
	if i >= 0 {
		*found++
		if p := d.skipped[i]; p.Level != level || p.Lower.String() != c.Separator.String() || fmt.Sprint(p.Upper) != fmt.Sprint(upper) {
			t.Fatalf("%+v is at level %d from %v to %v", p, level, c.Separator, upper)
		}
	}
	if level == 0 {
		return
	}
	children, err := readChildren(d.s, c, level)
	if err != nil {
		t.Fatal(err)
	}
	for i := range children {
		d.places(t, children[i], level-1, boundOf(children, i+1, upper), found)
	}
}

// TestMergesSkipUnreadablePages: whatever pages turn bad, of whatever level, a merge that has no
// input for them succeeds. One that has names them all, and succeeds when that input goes to the
// repair tree. No read returns a wrong version.
func TestMergesSkipUnreadablePages(t *testing.T) {
	skippedAny, refusedAny, levels := 0, 0, map[int]int{}
	for seed := range uint64(*unreadableSeeds / exhaustiveStep) {
		rng := rand.New(rand.NewPCG(seed, 11))
		size := []int{512, 1024}[seed%2]
		d := &damaged{
			workload: &workload{rng: rng, m: model{}, pageSize: size, keySpace: 40 << (seed % 6), deletes: int(seed * 7 % 60)},
			s:        newStore(size), bad: map[page.ID]struct{}{}, avoid: Avoided{},
		}
		configure := func(in *MergeInput) {
			r := rand.New(rand.NewPCG(seed, uint64(d.epoch))) // the same for each attempt
			in.Workers = Always(1 + r.IntN(3))
			for range r.IntN(4) {
				in.Cuts.Keys = append(in.Cuts.Keys, fmt.Appendf(nil, "%c%03d", 'a'+r.IntN(3), r.IntN(100)))
			}
			slices.SortFunc(in.Cuts.Keys, bytes.Compare)
			in.Cuts.Keys = slices.CompactFunc(in.Cuts.Keys, bytes.Equal)
			if r.IntN(2) == 0 {
				in.Relocate = Relocation{From: page.ID(len(d.s.used) / 2), Max: r.IntN(20)}
			}
		}
		for round := range 10 {
			d.step(t, d.entries(rng.IntN(300)), configure)
			refusedAny += d.compare(t, d.live)
			d.checkSkipped(t)
			if t.Failed() {
				t.Fatalf("seed %d, round %d", seed, round)
			}
			if round < 3 {
				continue
			}
			for _, id := range slices.Sorted(maps.Keys(d.s.pages)) {
				if rng.IntN(80) == 0 && !d.inRepairTree(id) {
					d.bad[id] = struct{}{}
				}
			}
		}
		skippedAny += len(d.skipped)
		for _, p := range d.skipped {
			levels[p.Level]++
		}
	}
	if skippedAny < 20/exhaustiveStep || refusedAny == 0 || levels[1] == 0 || levels[2] == 0 {
		t.Fatalf("%d pages were skipped, by level %v, and %d reads refused: the test tests little", skippedAny, levels, refusedAny)
	}
	t.Logf("%d pages skipped, by level %v, %d reads refused", skippedAny, levels, refusedAny)
}

// inRepairTree reports whether a page belongs to the repair tree.
func (d *damaged) inRepairTree(id page.ID) (in bool) {
	_ = Walk(d.s, d.repairTree, &Visitor{Page: func(p page.ID, _ int, _ []byte) error {
		in = in || p == id
		return nil
	}})
	return in
}

// flappingSource cannot read one page in one of two reads.
type flappingSource struct {
	Source
	page  page.ID
	reads *int
	fails int
}

func (f flappingSource) Page(id page.ID, level int) ([]byte, error) {
	if id == f.page {
		if *f.reads++; *f.reads == f.fails {
			return nil, errBad
		}
	}
	return f.Source.Page(id, level)
}

// TestADividedLeafIsSkippedWhole: a device that begins or ceases to fail between the reads of two partitions that share a leaf makes both halves of it
// a skipped range. A record of one half would say that the other one is of another place.
func TestADividedLeafIsSkippedWhole(t *testing.T) {
	s := newStore(512)
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 100, 1, 12), Policy{})).Root
	leaves := leavesOf(t, s, root)
	p, err := s.Page(leaves[2].ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	v := page.Leaf(p).Layout()
	key := v.Key(nil, v.Count()/2)
	for fails := 1; fails < 3; fails++ {
		in, reads := s.mergeInput(root, []Entry{{Key: key, Trailer: keys.MakeTrailer(900, keys.KindSet)}}, Policy{}), 0
		in.Cuts.Keys = [][]byte{key}
		in.Unreadable = func(err error) bool { return errors.Is(err, errBad) }
		in.Source = func() Source { return flappingSource{s, leaves[2].ID, &reads, fails} }
		var found *UnreadableError
		if _, err := Merge(t.Context(), in); !errors.As(err, &found) || reads != 2 {
			t.Fatalf("%d reads: %v", reads, err)
		}
		if q := found.Pages[0]; q.Lower.String() != leaves[2].Separator.String() || q.Upper.String() != leaves[3].Separator.String() {
			t.Errorf("read %d fails: from %v to %v, of a leaf from %v to %v", fails, q.Lower, q.Upper, leaves[2].Separator, leaves[3].Separator)
		}
	}
}

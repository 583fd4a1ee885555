package btree

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// checkRatios compares the dead-version ratios in inner nodes with the pages below.
func (s *store) checkRatios(t testing.TB, c page.Child, level int) {
	t.Helper()
	if level == 0 || c.ID == 0 {
		return
	}
	children, err := readChildren(s, c, level)
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range children {
		if got := ratioOf(s.pages[g.ID], level-1, &g.Separator); got != g.DeadVersions {
			t.Fatalf("page %d has the dead-version ratio %d for page %d, whose ratio is %d", c.ID, g.DeadVersions, g.ID, got)
		}
		s.checkRatios(t, g, level-1)
	}
}

// search is a search that stops at damage.
func search(p Policy, maxLeaves int) *VacuumSearch {
	return &VacuumSearch{Policy: p, Max: maxLeaves, Damaged: func(err error) error { return err }}
}

// vacuumAll searches and merges without input until a search reaches the end.
func (s *store) vacuumAll(t testing.TB, root Root, find *VacuumSearch, stats *Stats) (Root, int) {
	t.Helper()
	for rounds := 1; ; rounds++ {
		found, err := find.Find(t.Context(), &scribbler{s: s}, root)
		if err != nil {
			t.Fatal(err)
		}
		in := s.mergeInput(root, nil, find.Policy)
		in.Vacuum = found
		in.Workers = Always(1 + rounds%2)
		res := s.apply(t, in)
		if res.Stats.VersionsDropped < int64(found.Versions) {
			t.Fatalf("%d versions dropped, the search promised %d", res.Stats.VersionsDropped, found.Versions)
		}
		if found.Leaves == 0 && res.Stats.LeafPages > 0 {
			t.Fatal("nothing was found, and something was written")
		}
		root = res.Root
		stats.Add(&res.Stats)
		s.check(t, root)
		if found.Next == nil {
			return root, rounds
		}
		find.From = *found.Next
	}
}

// vacuum vacuums the whole tree and expects exactly those versions that a snapshot can see.
func (w *workload) vacuum(t *testing.T, s *store, root Root, p *Policy, stats *Stats) Root {
	t.Helper()
	root, _ = s.vacuumAll(t, root, search(*p, 1+w.rng.IntN(40)), stats)
	w.compare(t, s, root, p)
	w.count(t, s, root, stats)
	frontier := p.MinVisible
	if n := len(p.Snapshots); n > 0 {
		frontier = p.Snapshots[n-1]
	}
	for key, versions := range s.allVersions(t, root) {
		for i, v := range versions {
			seen := i == 0 || versions[i-1].Epoch() > frontier
			for _, at := range append([]keys.Epoch{p.MinVisible}, p.Snapshots...) {
				seen = seen || v.Epoch() <= at && versions[i-1].Epoch() > at
			}
			if !seen || i == 0 && v.Kind() == keys.KindDelete && v.Epoch() <= p.MinVisible {
				t.Fatalf("version %d of %q at %d is left, no snapshot sees it: snapshots %v, versions %v", i, key, v.Epoch(), p.Snapshots, versions)
			}
		}
	}
	return root
}

// allVersions is all versions in the tree, by key, newest first.
func (s *store) allVersions(t *testing.T, root Root) map[string][]keys.Trailer {
	t.Helper()
	all := map[string][]keys.Trailer{}
	err := Walk(s, root, &Visitor{Page: func(_ page.ID, level int, p []byte) error {
		if level > 0 {
			return nil
		}
		v := page.Leaf(p).Layout()
		for i := range v.Count() {
			key := string(v.Prefix()) + string(v.Suffix(i))
			all[key] = append(all[key], v.Trailer(i))
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestVacuumDropsWhatASnapshotRetained overwrites and deletes most of a tree under a snapshot, ends
// it, and vacuums: every version that it retained is dropped, and every tombstone, without reading
// another leaf.
func TestVacuumDropsWhatASnapshotRetained(t *testing.T) {
	s := newStore(512)
	held := Policy{MinVisible: 1, Snapshots: []keys.Epoch{1, 3}}
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 6000, 1, 12), held)).Root
	clean := len(s.pages)
	root = s.apply(t, s.mergeInput(root, numbered(1000, 2000, 2, 12), held)).Root
	root = s.apply(t, s.mergeInput(root, deletes(numbered(2000, 1000, 3, 0), 3), held)).Root

	var stats Stats
	if _, rounds := s.vacuumAll(t, root, search(held, 1<<20), &stats); rounds != 1 || stats.VersionsDropped != 0 || stats.LeafPages != 0 {
		t.Fatalf("a held version was dropped: %+v", stats)
	}
	share, err := DeadVersionRatio(s, root)
	if err != nil || share.Ratio() < 0.2 || share.Ratio() > 0.7 {
		t.Fatalf("dead-version ratio %.2f, %v", share.Ratio(), err)
	}
	s.reads = 0
	found, err := search(Policy{MinVisible: 3}, 1<<20).Find(t.Context(), s, root)
	if leaves, inner := s.kinds(); err != nil || s.reads > leaves*2/3+inner {
		t.Fatalf("%d pages read to find %d leaves of %d: %v", s.reads, found.Leaves, leaves, err)
	}
	root, rounds := s.vacuumAll(t, root, search(Policy{MinVisible: 3}, 20), &stats)
	if rounds < 5 {
		t.Fatalf("%d rounds of 20 leaves", rounds)
	}
	for key, versions := range s.allVersions(t, root) {
		if len(versions) != 1 || versions[0].Kind() == keys.KindDelete {
			t.Fatalf("%q still has %v", key, versions)
		}
	}
	if share, err := DeadVersionRatio(s, root); err != nil || share != 0 {
		t.Fatalf("dead-version ratio %d, %v", share, err)
	}
	if len(s.pages) > clean {
		t.Fatalf("%d pages, %d before anything was superseded", len(s.pages), clean)
	}
	if stats.TombstonesDropped != 1000 {
		t.Fatalf("%+v", stats)
	}
	if found, err := search(Policy{MinVisible: 9}, 1).Find(t.Context(), s, root); err != nil || found.Read != 0 {
		t.Fatalf("%+v: expected no dead versions: %v", found, err)
	}
}

// TestVacuumOfOneKeyAcrossManyLeaves lets a snapshot at every tenth epoch retain a version of one
// key, ends all but one, and vacuums a leaf at a time.
func TestVacuumOfOneKeyAcrossManyLeaves(t *testing.T) {
	s := newStore(512)
	var entries []Entry
	var all []keys.Epoch
	for e := keys.Epoch(1000); e > 0; e-- {
		entries = append(entries, set("hot", e, "some value of the key that everybody writes"))
		all = append(all, 1001-e)
	}
	entries = append(append([]Entry{set("cold", 5, "x")}, entries...), set("zero", 6, "y"))
	root := s.apply(t, s.mergeInput(Root{}, entries, Policy{MinVisible: 1, Snapshots: all})).Root
	var stats Stats
	root, _ = s.vacuumAll(t, root, search(Policy{MinVisible: 500, Snapshots: []keys.Epoch{500, 1000}}, 1), &stats)
	got := s.allVersions(t, root)
	if want := []keys.Trailer{keys.MakeTrailer(1000, keys.KindSet), keys.MakeTrailer(500, keys.KindSet)}; !slices.Equal(got["hot"], want) ||
		len(got["cold"]) != 1 || len(got["zero"]) != 1 {
		t.Fatalf("%v", got)
	}
	root, _ = s.vacuumAll(t, root, search(Policy{MinVisible: 1000}, 1), &stats)
	if got := s.allVersions(t, root); len(got["hot"]) != 1 || len(s.pages) > 3 {
		t.Fatalf("%v in %d pages", got, len(s.pages))
	}
}

// TestWorkersDoNotChangeAByteOfAVacuum does one vacuum with one worker and with several, with input
// and without.
func TestWorkersDoNotChangeAByteOfAVacuum(t *testing.T) {
	base := newStore(512)
	held := Policy{MinVisible: 1, Snapshots: []keys.Epoch{1, 3}}
	root := base.apply(t, base.mergeInput(Root{}, numbered(0, 20000, 1, 12), held)).Root
	root = base.apply(t, base.mergeInput(root, sorted(shuffled(numbered(0, 20000, 2, 12), 1)[:6000]), held)).Root
	for _, entries := range [][]Entry{nil, sorted(shuffled(numbered(0, 20000, 3, 12), 2)[:500])} {
		var want *store
		for _, workers := range []int{1, 3} {
			s := base.clone()
			in := s.mergeInput(root, entries, Policy{MinVisible: 3})
			find := search(in.Policy, 400)
			find.From = page.Separator{Key: []byte("key00002"), Trailer: page.NoTrailer}
			found, err := find.Find(t.Context(), s, root)
			if err != nil || found.Leaves < 100 {
				t.Fatalf("%+v, %v", found, err)
			}
			in.Vacuum, in.Workers = found, Always(workers)
			res := s.apply(t, in)
			s.check(t, res.Root)
			if want == nil {
				want = s
			} else if !maps.EqualFunc(s.pages, want.pages, slices.Equal) {
				t.Fatalf("%d workers wrote other bytes than one", workers)
			}
		}
	}
}

// TestVacuumSearchSkipsDamagedPages damages a leaf with dead versions and the inner node before it.
func TestVacuumSearchSkipsDamagedPages(t *testing.T) {
	held := Policy{MinVisible: 3, Snapshots: []keys.Epoch{3, 4}}
	s := newStore(512)
	root := s.apply(t, s.mergeInput(Root{}, numbered(0, 4000, 3, 12), held)).Root
	root = s.apply(t, s.mergeInput(root, numbered(0, 4000, 4, 12), held)).Root
	whole, err := search(Policy{MinVisible: 4}, 1<<20).Find(t.Context(), s, root)
	if err != nil {
		t.Fatal(err)
	}
	bad := s.levelOne(root)
	below := page.Inner(s.pages[bad]).Count()
	delete(s.pages, bad)
	if _, err := search(Policy{MinVisible: 4}, 1<<20).Find(t.Context(), s, root); err == nil {
		t.Fatal("the search does not mention the damage")
	}
	damaged := 0
	find := &VacuumSearch{Policy: Policy{MinVisible: 4}, Max: 1 << 20, Damaged: func(error) error { damaged++; return nil }}
	found, err := find.Find(t.Context(), s, root)
	if err != nil || damaged != 1 || found.Leaves != whole.Leaves-below {
		t.Fatalf("%d leaves found, %d without damage, %d damaged, %d damages: %v", found.Leaves, whole.Leaves, below, damaged, err)
	}
	find.Avoid = Avoided{bad: nil}
	found, err = find.Find(t.Context(), s, root)
	if err != nil || damaged != 1 || found.Leaves != whole.Leaves-below {
		t.Fatalf("%d leaves found with an avoided page, %d damages: %v", found.Leaves, damaged, err)
	}
}

// failingLeaves is a source whose leaves cannot be read.
type failingLeaves struct {
	*store
	asked int
}

func (f *failingLeaves) Page(id page.ID, level int) ([]byte, error) {
	if level > 0 {
		return f.store.Page(id, level)
	}
	f.asked++
	return nil, errors.New("the device does not read it")
}

// TestAVacuumReadsNoMoreLeavesOfAFailingDevice: each of them may take seconds.
func TestAVacuumReadsNoMoreLeavesOfAFailingDevice(t *testing.T) {
	s := newStore(512)
	var entries []Entry
	for i := range 2000 {
		k := fmt.Sprintf("key-%05d", i)
		entries = append(entries, set(k, 9, "new"), set(k, 3, "old"))
	}
	r := s.apply(t, s.mergeInput(Root{}, entries, Policy{MinVisible: 3, Snapshots: []keys.Epoch{3, 9}}))
	src := &failingLeaves{store: s}
	search := VacuumSearch{Policy: Policy{MinVisible: 9, Snapshots: []keys.Epoch{9}}, Max: 20, Damaged: func(error) error { return nil }}
	found, err := search.Find(t.Context(), src, r.Root)
	if err != nil || src.asked != 20 || found.Read != 20 || found.Next == nil {
		t.Errorf("%d leaves were asked for, %+v, %v", src.asked, found, err)
	}
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := search.Find(ended, src, r.Root); !errors.Is(err, context.Canceled) || src.asked != 20 {
		t.Errorf("%d leaves were asked for in all after the context has ended: %v", src.asked, err)
	}
}

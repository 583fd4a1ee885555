package btree

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

var recordsSeeds = flag.Int("records.seeds", 4, "runs of the test of merges of the store's own records")

const requestPrefix = "\x01r"

// records are the store's own in a workload: some are of requests, which are written once and expire in their order,
// and of the others the past is not kept for as long as that of client keys.
type records struct {
	requests, expired int
	system            []keys.Epoch // the epochs at which the other records may be read; above the last one any
}

func requestKey(n int) string { return fmt.Sprintf("%s%06d", requestPrefix, n) }

func (r *records) key(n int) string {
	if n%2 == 0 {
		r.requests++
		return requestKey(r.requests)
	}
	return fmt.Sprintf("\x01%0*d", 1+n%23, n)
}

// policy completes p. An epoch that records cannot be read at any more does not come back.
func (r *records) policy(w *workload, p *Policy) {
	least := p.MinVisible
	if len(r.system) > 0 {
		least = max(least, r.system[0])
	}
	if w.rng.IntN(2) == 0 {
		least += keys.Epoch(w.rng.IntN(int(w.frontier-least) + 1))
	}
	r.system = nil
	for _, e := range p.Snapshots {
		if e >= least {
			r.system = append(r.system, e)
		}
	}
	if n := len(r.system); n == 0 || r.system[n-1] < w.frontier {
		r.system = append(r.system, w.frontier)
	}
	p.System = slices.Clone(r.system)
	if w.rng.IntN(2) == 0 {
		r.expired += w.rng.IntN(r.requests - r.expired + 1)
	}
	p.Expired = Range{Lower: []byte(requestPrefix), Upper: []byte(requestKey(r.expired))}
}

func (r *records) hasExpired(key string) bool {
	return strings.HasPrefix(key, requestPrefix) && key < requestKey(r.expired)
}

// lost reports whether no reader asks for a key at an epoch any more.
func (r *records) lost(key string, at, frontier keys.Epoch) bool {
	return r != nil && key[0] == 1 && (r.hasExpired(key) || at < frontier && !slices.Contains(r.system, at))
}

// mixture merges into a tree with damaged pages.
type mixture struct {
	*damaged
	from   page.Separator // where the vacuum of this step begins
	next   page.Separator // and that of the next one
	sum    Stats          // of all merges
	totals map[string]int
}

// configure lets a merge do, at random, everything that a merge can do besides.
func (x *mixture) configure(t *testing.T, seed uint64, in *MergeInput) {
	r := rand.New(rand.NewPCG(seed, uint64(x.epoch))) // the same for each attempt
	in.Workers = Always(1 + r.IntN(3))
	for range r.IntN(4) {
		in.Cuts.Keys = append(in.Cuts.Keys, []byte([]string{fmt.Sprintf("%c%03d", 'a'+r.IntN(3), r.IntN(100)), requestKey(r.IntN(1 + x.records.requests))}[r.IntN(2)]))
	}
	slices.SortFunc(in.Cuts.Keys, bytes.Compare)
	in.Cuts.Keys = slices.CompactFunc(in.Cuts.Keys, bytes.Equal)
	if r.IntN(2) == 0 {
		in.Relocate = Relocation{From: page.ID(len(x.s.used) / 2), Max: r.IntN(20)}
	}
	in.DropExpired = r.IntN(2) == 0
	rebuild := r.IntN(3) == 0
	if r.IntN(2) == 0 {
		find := search(in.Policy, 1+r.IntN(40))
		find.From, find.Avoid = x.from, in.Avoid
		find.Damaged = func(err error) error {
			if errors.Is(err, errBad) {
				return nil
			}
			return err
		}
		found, err := find.Find(t.Context(), in.Source(), in.Base)
		if err != nil {
			t.Fatal(err)
		}
		in.Vacuum, x.next = found, page.Separator{}
		if found.Next != nil {
			x.next = *found.Next
		}
	}
	if !in.Base.Empty() && rebuild {
		x.rebuild(t, in, page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: in.Base.ID}, in.Base.Level)
		if len(in.Rebuilt) > 0 {
			in.Cuts = Cuts{}
		}
	}
}

// rebuild lets a merge rebuild the topmost bad inner nodes that are not skipped.
func (x *mixture) rebuild(t *testing.T, in *MergeInput, c page.Child, level int) {
	if _, avoided := in.Avoid[c.ID]; avoided || level == 0 {
		return
	}
	children, err := readChildren(x.s, c, level)
	if err != nil {
		t.Fatal(err)
	}
	if _, bad := x.bad[c.ID]; bad {
		in.Rebuilt = append(in.Rebuilt, RebuiltNode{ID: c.ID, Level: level, Children: children})
		return
	}
	for _, g := range children {
		x.rebuild(t, in, g, level-1)
	}
}

// merged follows a merge that was applied.
func (x *mixture) merged(t *testing.T, in *MergeInput, res *Result) {
	t.Helper()
	for i := range in.Rebuilt {
		if !slices.Contains(res.Freed, in.Rebuilt[i].ID) {
			t.Fatalf("rebuilt node %d is still in the tree", in.Rebuilt[i].ID)
		}
		delete(x.bad, in.Rebuilt[i].ID)
		x.totals["rebuilt"]++
	}
	x.from = x.next
	x.sum.Add(&res.Stats)
	x.totals["vacuumed"] += res.Stats.LeavesVacuumed
	all := x.s.allVersions(t, x.root)
	for key, versions := range all {
		for _, v := range versions {
			if x.records.hasExpired(key) && v.Kind() != keys.KindDelete && in.DropExpired && !x.covers([]byte(key), v) {
				t.Fatalf("expired key %q is left", key)
			}
			if !slices.ContainsFunc(x.m[key], func(m modelVersion) bool { return m.epoch == v.Epoch() }) {
				t.Fatalf("%q at %d was never written", key, v.Epoch())
			}
		}
	}
	x.totals["expired"] = x.records.expired
}

// checkBoth: the pages of both trees are those of the store, the ratios of dead versions are right, and what all merges
// counted is what the tree has.
func (x *mixture) checkBoth(t *testing.T) {
	t.Helper()
	pages, refs := 0, 0
	var got Stats
	for _, root := range []Root{x.root, x.repairTree} {
		last := ""
		err := Walk(x.s, root, &Visitor{Page: func(id page.ID, level int, p []byte) error {
			pages++
			if level > 0 {
				return nil
			}
			v := page.Leaf(p).Layout()
			for i := range v.Count() {
				_, tr, value, large := v.At(i)
				if large {
					refs++
				}
				key := string(v.Prefix()) + string(v.Suffix(i))
				if root == x.root {
					got.Versions++
					got.Bytes += int64(len(key) + len(value))
					if key != last && tr.Kind().HasValue() {
						got.CountKey([]byte(key), 1)
					}
				}
				last = key
			}
			return page.Verify(p)
		}})
		if err != nil {
			t.Fatal(err)
		}
		x.s.checkRatios(t, page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: root.ID}, root.Level)
	}
	if pages != len(x.s.pages) || refs != len(x.s.values) {
		t.Fatalf("%d pages and %d references are reached, %d and %d are in the store", pages, refs, len(x.s.pages), len(x.s.values))
	}
	if got.Keys != x.sum.Keys || got.SystemKeys != x.sum.SystemKeys || got.Versions != x.sum.Versions || got.Bytes != x.sum.Bytes {
		t.Fatalf("the tree has %+v, merges said %+v", got, x.sum)
	}
}

// checkNewest compares NewestEpoch with the model for the keys that the repair tree has nothing of.
func (x *mixture) checkNewest(t *testing.T, since keys.Epoch) {
	t.Helper()
	for k, versions := range x.m {
		newest := versions[0].epoch
		if x.records.hasExpired(k) || x.covers([]byte(k), newestBefore(keys.MaxEpoch)) || x.covers([]byte(k), keys.MakeTrailer(newest, versions[0].kind)) {
			continue
		}
		want := newest
		if want <= since {
			want = 0
		}
		if got, err := NewestEpoch(x.s, x.root, []byte(k), since); err != nil || got != want {
			t.Fatalf("NewestEpoch(%q, %d) = %d, %v, want %d", k, since, got, err, want)
		}
	}
}

// TestMergesOfRecordsOverUnreadablePages: all that a merge can do, at once and at random: some pages cannot be read, some inner
// nodes are rebuilt, requests expire, the store's own records keep less history, pages move, and dead versions are vacuumed. No
// read is wrong, no page or value is lost or freed twice, and the counts are those of the tree.
func TestMergesOfRecordsOverUnreadablePages(t *testing.T) {
	totals := map[string]int{}
	for seed := range uint64(max(*recordsSeeds/exhaustiveStep, 1)) {
		rng := rand.New(rand.NewPCG(seed, 12))
		size := []int{512, 1024}[seed%2]
		x := &mixture{totals: totals, damaged: &damaged{
			workload: &workload{
				rng: rng, m: model{}, pageSize: size, keySpace: 40 << (seed % 6), deletes: int(seed * 7 % 60), records: &records{},
			},
			s: newStore(size), bad: map[page.ID]struct{}{}, avoid: Avoided{},
		}}
		x.onMerge = func(in *MergeInput, res *Result) { x.merged(t, in, res) }
		for round := range 12 {
			x.step(t, x.entries(rng.IntN(300)), func(in *MergeInput) { x.configure(t, seed, in) })
			x.compare(t, x.live)
			x.checkSkipped(t)
			x.checkBoth(t)
			x.checkNewest(t, x.frontier)
			if round < 3 {
				continue
			}
			for _, id := range slices.Sorted(maps.Keys(x.s.pages)) {
				if rng.IntN(80) == 0 && !x.inRepairTree(id) {
					x.bad[id] = struct{}{}
				}
			}
		}
		totals["skipped"] += len(x.skipped)
	}
	for _, what := range []string{"rebuilt", "vacuumed", "expired", "skipped"} {
		if totals[what] == 0 && *recordsSeeds >= 16*exhaustiveStep {
			t.Errorf("nothing was %s: the test tests little", what)
		}
	}
	t.Log(totals)
}

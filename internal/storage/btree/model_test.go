package btree

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// model is what a tree should hold: all versions ever written, and the policies' promise about
// which of them are still there.
type model map[string][]modelVersion // newest first

type modelVersion struct {
	epoch keys.Epoch
	kind  keys.Kind
	value []byte
}

func (m model) at(key string, e keys.Epoch) (modelVersion, bool) {
	for _, v := range m[key] {
		if v.epoch <= e {
			return v, true
		}
	}
	return modelVersion{}, false
}

// workload makes merges of random versions, some keys hot, some values large, some keys deleted.
type workload struct {
	rng      *rand.Rand
	m        model
	epoch    keys.Epoch
	pageSize int
	keySpace int
	deletes  int // percent
	live     []keys.Epoch
	frontier keys.Epoch // the newest snapshot ever taken
	records  *records   // the store's own, or nil
}

func (w *workload) key() string {
	n := w.rng.IntN(w.keySpace)
	if w.rng.IntN(10) == 0 {
		n = w.rng.IntN(3)
	}
	if w.records != nil && w.rng.IntN(2) == 0 {
		return w.records.key(n)
	}
	k := fmt.Sprintf("%c%0*d", 'a'+n%3, 1+n%17, n)
	if n%50 == 7 {
		k += string(bytes.Repeat([]byte{'x'}, page.KeySizeMax(w.pageSize)-len(k)))
	}
	return k
}

func (w *workload) value() []byte {
	n := w.rng.IntN(40)
	switch w.rng.IntN(30) {
	case 0:
		n = page.InlineMax(w.pageSize) - 2 + w.rng.IntN(5)
	case 1:
		n = page.InlineMax(w.pageSize) + w.rng.IntN(2000)
	}
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(w.rng.Uint32())
	}
	return b
}

// metadata makes a section, short or of the greatest length.
func (w *workload) metadata() []byte {
	f := metadata.Fields{ExpiresAt: uint64(w.rng.IntN(1000))}
	if w.rng.IntN(3) == 0 {
		f = metadata.Fields{ExpiresAt: math.MaxUint64, Lease: math.MaxUint64, CreateRevision: math.MaxUint64, KeyVersion: math.MaxUint64, ModRevision: math.MaxUint64, Position: math.MaxUint64}
	}
	return f.Append(nil)
}

// entries makes n versions with new epochs and adds them to the model.
func (w *workload) entries(n int) []Entry {
	var out []Entry
	for range n {
		w.epoch++
		k, v := w.key(), modelVersion{epoch: w.epoch, kind: keys.KindSet}
		if w.rng.IntN(100) < w.deletes {
			v.kind = keys.KindDelete
		} else {
			v.value = w.value()
			if w.rng.IntN(4) == 0 {
				v.kind, v.value = keys.KindSetMetadata, append(w.metadata(), v.value...)
			}
		}
		w.m[k] = slices.Insert(w.m[k], 0, v)
		out = append(out, Entry{Key: []byte(k), Trailer: keys.MakeTrailer(v.epoch, v.kind), Value: v.value})
	}
	slices.SortFunc(out, func(a, b Entry) int { return keys.Compare(a.Key, a.Trailer, b.Key, b.Trailer) })
	return out
}

// policy ends some snapshots, takes new ones, none below the newest one so far, and returns the
// policy for them.
func (w *workload) policy() Policy {
	w.live = slices.DeleteFunc(w.live, func(keys.Epoch) bool { return w.rng.IntN(3) == 0 })
	for range w.rng.IntN(4) {
		w.frontier += keys.Epoch(w.rng.IntN(int(w.epoch-w.frontier) + 1))
		if n := len(w.live); n == 0 || w.live[n-1] < w.frontier {
			w.live = append(w.live, w.frontier)
		}
	}
	p := Policy{MinVisible: w.frontier}
	if len(w.live) > 0 {
		p = Policy{MinVisible: w.live[0], Snapshots: slices.Clone(w.live)}
	}
	if w.records != nil {
		w.records.policy(w, &p)
	}
	return p
}

var modelSeeds = flag.Uint64("model.seeds", 28, "runs of the model test")

// TestTreeIsASortedMapWithVersions merges random versions and compares every read at every live
// snapshot with the model, after each merge, under random policies, fills, cuts, worker counts and
// relocations.
func TestTreeIsASortedMapWithVersions(t *testing.T) {
	for seed := range max(*modelSeeds/exhaustiveStep, 1) {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(seed, 3))
			size := []int{512, 1024, 8192}[seed%3]
			w := &workload{rng: rng, m: model{}, pageSize: size, keySpace: 20 << (seed % 7), deletes: int(seed * 7 % 60)}
			s := newStore(size)
			var root Root
			var stats Stats
			for range 12 {
				in := s.mergeInput(root, w.entries(rng.IntN(400)), w.policy())
				in.Workers = Always(1 + rng.IntN(3))
				percent := 50 + rng.IntN(51)
				for range rng.IntN(4) {
					in.Cuts.Keys = append(in.Cuts.Keys, []byte(w.key()))
				}
				slices.SortFunc(in.Cuts.Keys, bytes.Compare)
				if rng.IntN(3) == 0 {
					in.Relocate = Relocation{From: page.ID(len(s.used) / 2), Max: rng.IntN(20)}
				}
				res := s.applyFilling(t, in, percent, 1+rng.IntN(8))
				root = res.Root
				stats.Add(&res.Stats)
				s.check(t, root)
				w.compare(t, s, root, &in.Policy)
				w.count(t, s, root, &stats)
				w.compareFindAll(t, s, root)
				w.compareCursor(t, s, root, in.Policy.Snapshots)
				if rng.IntN(3) == 0 {
					root = w.vacuum(t, s, root, &in.Policy, &stats)
				}
			}
		})
	}
}

// compare reads every key at every epoch at which a snapshot may still read.
func (w *workload) compare(t *testing.T, s *store, root Root, p *Policy) {
	t.Helper()
	live := append([]keys.Epoch{w.frontier, w.frontier + 1, w.frontier + 7, w.epoch, keys.MaxEpoch}, p.Snapshots...)
	for k := range w.m {
		for _, e := range live {
			want, ok := w.m.at(k, e)
			got, found, err := Get(s, root, []byte(k), e)
			if err != nil {
				t.Fatal(err)
			}
			alive := ok && want.kind.HasValue()
			if found && (got.Epoch != want.epoch || got.Kind != want.kind || !bytes.Equal(s.value(t, got), want.value)) || !found && alive {
				t.Fatalf("Get(%q, %d) = %d %v, want %d %v", k, e, got.Epoch, found, want.epoch, ok)
			}
		}
		newest := w.m[k][0]
		for _, since := range []keys.Epoch{p.MinVisible, newest.epoch, newest.epoch - 1} {
			if since < p.MinVisible {
				continue
			}
			want := newest.epoch
			if want <= since {
				want = 0
			}
			if got, err := NewestEpoch(s, root, []byte(k), since); err != nil || got != want {
				t.Fatalf("NewestEpoch(%q, %d) = %d, %v, want %d", k, since, got, err, want)
			}
		}
	}
	w.compareRanges(t, s, root, p)
}

func (w *workload) compareRanges(t *testing.T, s *store, root Root, p *Policy) {
	t.Helper()
	all := slices.Sorted(maps.Keys(w.m))
	for range 20 {
		lo, hi := w.key(), w.key()
		since := w.frontier + keys.Epoch(w.rng.IntN(100))
		want := slices.ContainsFunc(all, func(k string) bool { return k >= lo && k < hi && w.m[k][0].epoch > since })
		if got, err := ChangedSince(s, root, []byte(lo), []byte(hi), since); err != nil || got != want {
			t.Fatalf("ChangedSince(%q, %q, %d) = %v, %v, want %v", lo, hi, since, got, err, want)
		}
	}
}

// count compares the statistics that merges summed up with the contents of the tree.
func (w *workload) count(t *testing.T, s *store, root Root, sum *Stats) {
	t.Helper()
	var got Stats
	last := ""
	err := Walk(s, root, &Visitor{Page: func(_ page.ID, level int, p []byte) error {
		if level > 0 {
			return nil
		}
		v := page.Leaf(p).Layout()
		for i := range v.Count() {
			_, tr, value, _ := v.At(i)
			key := string(v.Prefix()) + string(v.Suffix(i))
			got.Versions++
			got.Bytes += int64(len(key) + len(value))
			if key != last && tr.Kind().HasValue() {
				got.Keys++
			}
			last = key
		}
		return nil
	}})
	if err != nil || got.Keys != sum.Keys || got.Versions != sum.Versions {
		t.Fatalf("tree has %d keys, %d versions; merges said %d, %d (%v)", got.Keys, got.Versions, sum.Keys, sum.Versions, err)
	}
}

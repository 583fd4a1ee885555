package memtable

import (
	"bytes"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

func chainOf(t *Table, key []byte) Chain { return Chain{t.node(key)} }

func epochsOf(t *Table, key []byte) (es []keys.Epoch) {
	base := t.arena.base
	for v := offsetIn(word64(base, t.node(key)).Load()); v != 0; v = versionOlder(base, v).Load() {
		es = append(es, versionTrailer(base, v).Epoch())
	}
	return es
}

func TestPruneRetainsExactlyWhatASnapshotSees(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		tab := mustNewIn(rt, tiny())
		defer tab.Free() //nolint:errcheck // a test's table
		key := []byte("pkey")
		var in Inserter
		var b batch.Builder
		epochs := rapid.SliceOfNDistinct(rapid.Uint64Range(1, 60), 1, 20, rapid.ID[uint64]).Draw(rt, "epochs")
		slices.Sort(epochs)
		for _, e := range epochs {
			putOne(t, tab, &in, &b, key, []byte{byte(e)}, keys.Epoch(e))
		}
		live := rapid.SliceOfN(rapid.Uint64Range(1, 60), 1, 5).Draw(rt, "live")
		slices.Sort(live)
		h := GCWatermarks{MinVisible: keys.Epoch(live[0]), LowWatermark: keys.Epoch(live[len(live)-1])}
		interior := rapid.Bool().Draw(rt, "interior")
		if interior {
			for _, e := range live {
				h.Snapshots = append(h.Snapshots, keys.Epoch(e))
			}
		}
		var want []keys.Epoch
		for i, e := range epochs {
			last := i == len(epochs)-1
			keep := last || epochs[i+1] > live[0]
			if interior && !last {
				keep = epochs[i+1] > live[len(live)-1] || slices.ContainsFunc(live, func(s uint64) bool { return e <= s && s < epochs[i+1] })
			}
			if keep {
				want = append(want, keys.Epoch(e))
			}
		}
		slices.Reverse(want)
		var r Retired
		freed := tab.Prune(chainOf(tab, key), &h, &r)
		if got := epochsOf(tab, key); !slices.Equal(got, want) || freed != len(epochs)-len(want) {
			rt.Fatalf("epochs %v, live %v, interior %v: left %v and freed %d, want %v", epochs, live, interior, got, freed, want)
		}
		if again := tab.Prune(chainOf(tab, key), &h, &r); again != 0 {
			rt.Fatalf("pruning again freed %d", again)
		}
		tab.Reclaim(&r)
		checkTable(t, tab)
	})
}

func mustNewIn(rt *rapid.T, c Config) *Table {
	tab, err := New(c)
	if err != nil {
		rt.Fatal(err)
	}
	return tab
}

func TestChainStoresBelowWhichWatermarkNothingCanBePruned(t *testing.T) {
	tab := mustNew(t, tiny())
	var in Inserter
	var b batch.Builder
	var r Retired
	key := []byte("pk")
	for e := keys.Epoch(10); e <= 40; e += 10 {
		putOne(t, tab, &in, &b, key, nil, e)
	}
	c := chainOf(tab, key)
	for _, step := range []struct {
		horizon keys.Epoch
		freed   int
		bound   keys.Epoch
	}{{5, 0, 20}, {19, 0, 20}, {20, 1, 30}, {29, 0, 30}, {35, 1, 40}, {45, 1, 46}} {
		if freed := tab.Prune(c, &GCWatermarks{MinVisible: step.horizon, LowWatermark: step.horizon}, &r); freed != step.freed {
			t.Errorf("horizon %d freed %d, want %d", step.horizon, freed, step.freed)
		}
		if bound := keys.Epoch(word64(tab.arena.base, c.node+nodeBoundWord).Load()); bound != step.bound {
			t.Errorf("after horizon %d the bound is %d, want %d", step.horizon, bound, step.bound)
		}
	}
	checkTable(t, tab)
}

func TestOverwritingOneKeyDoesNotGrowThePrunedTable(t *testing.T) {
	const overwrites, longChain = 200_000, 64
	c := Config{Bytes: 1 << 20, Prefix: []byte("p"), LongChain: longChain}
	tab := mustNew(t, c)
	var in Inserter
	var b batch.Builder
	var r Retired
	key, value := []byte("phot"), bytes.Repeat([]byte("v"), 100)
	grown, reports := 0, 0
	for e := keys.Epoch(1); e <= overwrites; e++ {
		putOne(t, tab, &in, &b, key, value[:90+e%10], e)
		for _, chain := range in.LongChains() {
			reports++
			tab.Prune(chain, &GCWatermarks{MinVisible: e, LowWatermark: e}, &r)
		}
		if e == overwrites/10 {
			grown = tab.Bytes()
		}
	}
	if tab.Bytes() != grown {
		t.Errorf("table grew from %d to %d bytes", grown, tab.Bytes())
	}
	if want := overwrites / (longChain - 1); reports < want-2 || reports > want+2 {
		t.Errorf("%d reports for %d overwrites, want about %d", reports, overwrites, want)
	}
	if n := tab.Versions(); n > longChain {
		t.Errorf("%d versions left", n)
	}
	checkTable(t, tab)
}

// One writer overwrites, two collectors prune, and readers hold snapshots: each must go on seeing
// the version of its epoch, whole.
func TestReadersSeeTheirVersionsWhileChainsArePruned(t *testing.T) {
	const epochs = 30_000
	tab := mustNew(t, tiny())
	key := []byte("phot")
	var (
		visible  atomic.Uint64
		snapshot [2]atomic.Uint64 // what each reader holds; the collector takes the minimum under mu
		mu       sync.Mutex
		wg       sync.WaitGroup
	)
	value := func(e uint64) []byte { return bytes.Repeat([]byte{byte(e), byte(e >> 8)}, 4+int(e%3)*4) }
	var in Inserter
	var b batch.Builder
	putOne(t, tab, &in, &b, key, value(1), 1)
	visible.Store(1)
	for i := range snapshot {
		snapshot[i].Store(1)
	}
	wg.Go(func() {
		for e := uint64(2); e <= epochs; e++ {
			putOne(t, tab, &in, &b, key, value(e), keys.Epoch(e))
			visible.Store(e)
		}
	})
	for i := range snapshot {
		wg.Go(func() {
			for n := 0; visible.Load() < epochs; n++ {
				mu.Lock()
				s := visible.Load()
				snapshot[i].Store(s)
				mu.Unlock()
				for range n % 5 { // some snapshots live longer
					v, ok := tab.Get(key, keys.Epoch(s))
					if !ok || uint64(v.Epoch) != s || !bytes.Equal(v.Value, value(s)) {
						t.Errorf("snapshot %d sees %+v, %v", s, v, ok)
						return
					}
				}
			}
		})
	}
	for range 2 {
		wg.Go(func() {
			var r Retired
			for visible.Load() < epochs {
				mu.Lock()
				h := GCWatermarks{LowWatermark: keys.Epoch(visible.Load())}
				for i := range snapshot {
					h.Snapshots = append(h.Snapshots, keys.Epoch(snapshot[i].Load()))
				}
				h.Snapshots = append(h.Snapshots, h.LowWatermark)
				slices.Sort(h.Snapshots)
				h.MinVisible = h.Snapshots[0]
				mu.Unlock()
				tab.Prune(chainOf(tab, key), &h, &r)
			}
			// Without a grace period in this test, interior versions are only counted.
		})
	}
	wg.Wait()
	var r Retired
	last := GCWatermarks{MinVisible: epochs, LowWatermark: epochs}
	tab.Prune(chainOf(tab, key), &last, &r)
	if n := tab.Versions(); n != 1 {
		t.Errorf("%d versions left", n)
	}
	checkTable(t, tab)
}

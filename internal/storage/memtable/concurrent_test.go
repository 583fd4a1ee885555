package memtable

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// seeded prints the seed of a random test, so that a failure can be repeated by putting it here.
func seeded(t *testing.T) func(part int) *rand.Rand {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	return func(part int) *rand.Rand { return rand.New(rand.NewPCG(seed, uint64(part))) }
}

func numberedKey(n int) []byte {
	return binary.BigEndian.AppendUint64([]byte("p"), uint64(n)*0x9e3779b97f4a7c15)
}

func putOne(tb testing.TB, t *Table, in *Inserter, b *batch.Builder, key, value []byte, e keys.Epoch) {
	b.Reset()
	b.Set(keys.SpaceOf(key), keys.User(key), value)
	body, err := b.Finish()
	if err == nil {
		err = t.Secure(in, MaxSize(body))
	}
	if err == nil {
		err = t.Apply(in, body, e, false)
	}
	if err != nil {
		tb.Error(err)
	}
}

func TestIteratorsSeeWhatWasAppliedBeforeAndInOrder(t *testing.T) {
	t.Run("plain heads", func(t *testing.T) { checkConcurrentIteration(t, tiny()) })
	t.Run("learned heads", func(t *testing.T) {
		c := tiny()
		var sample [][]byte
		for i := range 300 {
			sample = append(sample, numberedKey(7*i))
		}
		slices.SortFunc(sample, bytes.Compare)
		c.Heads = learnHeads(sample[100:200], 3000, nil) // most keys are outside the values that were seen
		checkConcurrentIteration(t, c)
	})
}

func checkConcurrentIteration(t *testing.T, c Config) {
	const universe, writers, perWriter = 3000, 4, 1500
	rnd := seeded(t)
	tab := mustNew(t, c)
	var (
		applied [universe]atomic.Bool
		epoch   atomic.Uint64
		writing atomic.Int32
		wg      sync.WaitGroup
	)
	writing.Store(writers)
	for w := range writers {
		wg.Go(func() {
			defer writing.Add(-1)
			var in Inserter
			var b batch.Builder
			r := rnd(w)
			run := 0
			for range perWriter {
				n := r.IntN(universe)
				if run++; w == 0 { // one writer puts neighbours, so that splits of runs are met too
					n = (run * 7) % universe
				}
				putOne(t, tab, &in, &b, numberedKey(n), []byte("v"), keys.Epoch(epoch.Add(1)))
				applied[n].Store(true)
			}
		})
	}
	for reader := range 3 {
		wg.Go(func() {
			var it Iter
			it.Init(tab)
			for writing.Load() > 0 {
				want := map[string]bool{}
				for n := range applied {
					if applied[n].Load() {
						want[string(numberedKey(n))] = true
					}
				}
				checkWalks(t, &it, want, reader)
			}
		})
	}
	wg.Go(func() {
		r := rnd(99)
		for writing.Load() > 0 {
			n := r.IntN(universe)
			was := applied[n].Load()
			k := numberedKey(n)
			_, ok := tab.Get(k, keys.MaxEpoch)
			if there := tab.search(k, tab.heads.of(k)) != 0; was && !(ok && there) {
				t.Errorf("key %d was applied: get %v, blocks %v", n, ok, there)
				return
			}
		}
	})
	wg.Wait()
	checkTable(t, tab)
}

// checkWalks walks the table in one of three ways and compares with what must be there at least.
func checkWalks(t *testing.T, it *Iter, want map[string]bool, way int) {
	last, found := "", 0
	step, ok := it.Next, it.First
	switch way {
	case 1:
		step, ok = it.Prev, it.Last
	case 2:
		step, ok = it.NextKey, it.First
	}
	for more := ok(); more; more = step() {
		k := string(it.Key())
		if k == last && way != 2 {
			continue // another version
		}
		if last != "" && (way == 1) == (k > last) {
			t.Errorf("way %d: %x after %x", way, k, last)
			return
		}
		if last = k; want[k] {
			found++
		}
	}
	if found < len(want) {
		t.Errorf("way %d: saw %d of %d keys applied before", way, found, len(want))
	}
}

// checkTable walks every structure of a table at rest and compares them with one another.
func checkTable(t *testing.T, tab *Table) {
	t.Helper()
	base, n, versions := tab.arena.base, 0, 0
	var it Iter
	it.Init(tab)
	var last []byte
	for ok := it.First(); ok; ok = it.NextKey() {
		if last != nil && string(last) >= string(it.Key()) {
			t.Fatalf("%x after %x", it.Key(), last)
		}
		last = it.Key()
		n++
		if node := tab.node(last); node != it.node() {
			t.Fatalf("look-up of %x finds node %d, want %d", last, node, it.node())
		}
		if node := tab.search(last, tab.heads.of(last)); node != it.node() {
			t.Fatalf("search of %x finds node %d, want %d", last, node, it.node())
		}
		length, newer := 0, keys.MaxEpoch+1
		for v := it.current(); v != 0; v = versionOlder(base, v).Load() {
			if e := versionTrailer(base, v).Epoch(); e >= newer {
				t.Fatalf("chain of %x: epoch %d behind %d", last, e, newer)
			} else {
				newer = e
			}
			length++
		}
		if length != tab.ChainLength(it.Chain()) {
			t.Fatalf("chain of %x counts %d versions and has %d", last, tab.ChainLength(it.Chain()), length)
		}
		versions += length
	}
	if n != tab.Count() || versions != tab.Versions() {
		t.Fatalf("table counts %d keys and %d versions, has %d and %d", tab.Count(), tab.Versions(), n, versions)
	}
	checkTowers(t, tab)
}

// checkTowers checks that every level is in order, that its links carry the right heads, and that a
// block's keys are within its tower's bounds.
func checkTowers(t *testing.T, tab *Table) {
	t.Helper()
	base := tab.arena.base
	for l := range int(tab.height.Load()) {
		for x := tab.first; x != 0; {
			link := towerLink(base, x, l).Load()
			next := offsetIn(link)
			if next != 0 {
				anchor := nodeKey(base, towerAnchor(base, next))
				if tab.heads.of(anchor) != headIn(link) {
					t.Fatalf("level %d: link to %x has head %x", l, anchor, headIn(link))
				}
				if x != tab.first && compareNode(base, towerAnchor(base, x), anchor) >= 0 {
					t.Fatalf("level %d: towers out of order at %x", l, anchor)
				}
			}
			if l == 0 {
				checkBlock(t, tab, x, next)
			}
			x = next
		}
	}
}

func checkBlock(t *testing.T, tab *Table, x, next uint32) {
	t.Helper()
	base := tab.arena.base
	var words [slotsMax]uint64
	block := towerBlock(base, x).Load()
	if block%blockAlign != 0 {
		t.Fatalf("block at word %d is not on a cache line", block)
	}
	n, _ := loadBlock(base, block, tab.slots, &words)
	for _, w := range words[:n] {
		k := nodeKey(base, offsetIn(w))
		if tab.heads.of(k) != headIn(w) {
			t.Fatalf("slot of %x has head %x", k, headIn(w))
		}
		if x != tab.first && compareNode(base, towerAnchor(base, x), k) > 0 {
			t.Fatalf("key %x is below its tower", k)
		}
		if next != 0 && compareNode(base, towerAnchor(base, next), k) <= 0 {
			t.Fatalf("key %x belongs to the next tower", k)
		}
	}
}

func TestRacersOnOneKeyLoseNothing(t *testing.T) {
	const racers, universe = 4, 400
	for _, indexBytes := range []int{1, 1 << 20} {
		t.Run(fmt.Sprintf("index=%d", indexBytes), func(t *testing.T) {
			rnd := seeded(t)
			c := tiny()
			c.layout.indexBytes = indexBytes
			tab := mustNew(t, c)
			var wg sync.WaitGroup
			for r := range racers {
				wg.Go(func() {
					var in Inserter
					var b batch.Builder
					order := rnd(1).Perm(universe) // the same for all
					for i, n := range order {
						// Epochs interleave, so that late ones are put after newer ones.
						putOne(t, tab, &in, &b, numberedKey(n), []byte{byte(r)}, keys.Epoch(i*racers+(r+i)%racers+1))
					}
				})
			}
			wg.Wait()
			if tab.Count() != universe || tab.Versions() != universe*racers {
				t.Errorf("%d keys and %d versions, want %d and %d", tab.Count(), tab.Versions(), universe, universe*racers)
			}
			checkTable(t, tab)
		})
	}
}

func TestBatchesAndSinglesOfManyWritersAreAllThere(t *testing.T) {
	const writers, rounds = 4, 60
	rnd := seeded(t)
	tab := mustNew(t, tiny())
	var wg sync.WaitGroup
	want := make([]map[string]bool, writers)
	for w := range writers {
		want[w] = map[string]bool{}
		wg.Go(func() {
			var in Inserter
			var b batch.Builder
			r := rnd(w)
			for i := range rounds {
				b.Reset()
				for range 1 + r.IntN(40) {
					k := fmt.Sprintf("p%08x-%d", r.Uint32()>>uint(r.IntN(16)), w)
					if !want[w][k] {
						want[w][k] = true
						b.Set(keys.SpaceOf([]byte(k)), []byte(k)[1:], []byte(k))
					}
				}
				body, err := b.Finish()
				if err == nil {
					err = tab.Secure(&in, MaxSize(body))
				}
				if err == nil {
					err = tab.Apply(&in, body, keys.Epoch(i*writers+w+1), true)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	n := 0
	for w := range want {
		for k := range want[w] {
			if v, ok := tab.Newest([]byte(k)); !ok || string(v.Value) != k {
				t.Fatalf("%q: %+v %v", k, v, ok)
			}
			n++
		}
	}
	if tab.Count() != n {
		t.Fatalf("%d keys, want %d", tab.Count(), n)
	}
	checkTable(t, tab)
}

package memtable

import (
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

func keysOf(t *Table, backward bool) (ks []string) {
	var it Iter
	it.Init(t)
	first, step := it.First, it.NextKey
	if backward {
		first, step = it.LastKey, it.PrevKey
	}
	for ok := first(); ok; ok = step() {
		ks = append(ks, string(it.Key()))
	}
	if backward {
		slices.Reverse(ks)
	}
	return ks
}

// A goroutine may be descheduled between the two steps of a split, for as long as the scheduler
// likes. The upper half is in two towers then.
func TestSplitLeftHalfDoneIsReadAndFinishedByOthers(t *testing.T) {
	tab := mustNew(t, tiny())
	var in Inserter
	var b batch.Builder
	want := []string{"pa", "pb", "pc", "pd"} // a full block
	for i, k := range []string{"pc", "pa", "pd", "pb"} {
		putOne(t, tab, &in, &b, []byte(k), nil, keys.Epoch(i+1))
	}
	base := tab.arena.base
	block := towerBlock(base, tab.first).Load()
	var words [slotsMax]uint64
	n, sorted := loadBlock(base, block, tab.slots, &words)
	if n != tab.slots {
		t.Fatalf("the block has %d entries", n)
	}
	arrived := words
	sortWords(base, words[:n], sorted)
	link := towerLink(base, tab.first, 0)
	tab.linkRight(&in, &in.splice, link, link.Load(), words[cutAt(base, arrived[:n], words[:n], sorted):n])
	if towerBlock(base, tab.first).Load() != block {
		t.Fatal("the split is finished already")
	}

	check := func(when string) {
		t.Helper()
		if got := keysOf(tab, false); !slices.Equal(got, want) {
			t.Errorf("%s, forward: %q, want %q", when, got, want)
		}
		if got := keysOf(tab, true); !slices.Equal(got, want) {
			t.Errorf("%s, backward: %q, want %q", when, got, want)
		}
		for _, k := range want {
			if tab.search([]byte(k), tab.heads.of([]byte(k))) == 0 {
				t.Errorf("%s: the blocks lack %q", when, k)
			}
		}
	}
	check("half done")
	var other Inserter
	putOne(t, tab, &other, &b, []byte("pcc"), nil, 5) // into the right tower, whose keys the left one still shows
	want = []string{"pa", "pb", "pc", "pcc", "pd"}
	check("with a key in the right half")
	putOne(t, tab, &other, &b, []byte("paa"), nil, 6) // into the left tower: another writer has to finish the split
	want = []string{"pa", "paa", "pb", "pc", "pcc", "pd"}
	check("finished")
	if towerBlock(base, tab.first).Load() == block {
		t.Error("the full block is still there")
	}
	checkTable(t, tab)
}

func TestInstallsOnAHotKeyAreAllCounted(t *testing.T) {
	const writers, each = 4, 3000
	c := tiny()
	c.layout.reserveBytes = 64 << 20
	tab := mustNew(t, c)
	var epoch atomic.Uint64
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			var in Inserter
			var b batch.Builder
			for range each {
				putOne(t, tab, &in, &b, []byte("phot"), nil, keys.Epoch(epoch.Add(1)))
			}
		})
	}
	wg.Wait()
	if n := tab.Versions(); n != writers*each {
		t.Errorf("%d versions, want %d", n, writers*each)
	}
	checkTable(t, tab)
}

// A CAS on a free list must fail when what it read has been taken and put back meanwhile, for the
// link it read is then old.
func TestFreeListDetectsATopThatCameBack(t *testing.T) {
	tab := mustNew(t, tiny())
	var in Inserter
	if err := tab.Secure(&in, 4096); err != nil {
		t.Fatal(err)
	}
	base := tab.arena.base
	class, words := classOf(10)
	a, b := in.alloc(words, 1), in.alloc(words, 1)
	for _, v := range []uint32{a, b} {
		writeVersion(base, v, 0, 0, make([]byte, 10), nil)
		tab.free.push(base, class, v, 0)
	}
	before := tab.free[class].Load()
	for range 2 {
		if tab.free.pop(base, class) == 0 {
			t.Fatal("the list is empty")
		}
	}
	if tab.free.pop(base, class) != 0 {
		t.Fatal("the list is not empty")
	}
	tab.free.push(base, class, b, 0)
	if after := tab.free[class].Load(); offsetIn(after) != offsetIn(before) || after == before {
		t.Errorf("the list's head was %x and is %x", before, after)
	}
}

// TestRunsGiveBackEveryVersionOnce: a chain of versions of several sizes is freed in runs, and what
// is taken afterwards is each of them once, by size, and no more than a run may hold at a time.
func TestRunsGiveBackEveryVersionOnce(t *testing.T) {
	tab := mustNew(t, tiny())
	rng := rand.New(rand.NewPCG(1, 2))
	var in Inserter
	base, chain := tab.arena.base, uint32(0)
	free := map[uint32]int{} // class of each
	for range 1000 {
		size := 10 + 20*rng.IntN(2)*rng.IntN(2) // stretches of one class, and changes
		if rng.IntN(100) == 0 {
			size = 3000 // larger than half a run
		}
		class, words := classOf(uint32(size))
		if err := tab.Secure(&in, int(words)*wordBytes); err != nil {
			t.Fatal(err)
		}
		v := in.alloc(words, 1)
		writeVersion(base, v, 0, 0, make([]byte, size), nil)
		setOlder(base, v, chain)
		chain, free[v] = v, class
	}
	if n := tab.free.pushChain(base, chain); n != len(free) {
		t.Fatalf("%d of %d versions are freed", n, len(free))
	}
	for _, size := range []int{10, 30, 3000} {
		class, words := classOf(uint32(size))
		for run := tab.free.pop(base, class); run != 0; run = tab.free.pop(base, class) {
			length := uint32(0)
			for v := run; v != 0; v = versionOlder(base, v).Load() {
				if got, ok := free[v]; !ok || got != class {
					t.Fatalf("version %d of class %d came out of class %d, or twice", v, got, class)
				}
				delete(free, v)
				length++
			}
			if length > runLengthMax || length > 1 && length*words > runWordsMax {
				t.Errorf("a run of %d versions of %d words", length, words)
			}
		}
	}
	if len(free) > 0 {
		t.Errorf("%d versions are lost", len(free))
	}
}

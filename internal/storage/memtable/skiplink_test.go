package memtable

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

// epochValue is the epoch eight bytes long, and up to 16 bytes more.
func epochValue(dst []byte, e keys.Epoch) []byte {
	return append(binary.LittleEndian.AppendUint64(dst[:0], uint64(e)), make([]byte, e%17)...)
}

// checkRead reads a key at an epoch at which the newest version is that of want, or none if that is zero.
func checkRead(t *testing.T, tab *Table, key []byte, at, want keys.Epoch) {
	t.Helper()
	v, ok := tab.Get(key, at)
	if ok != (want != 0) || ok && (v.Epoch != want || binary.LittleEndian.Uint64(v.Value) != uint64(want)) {
		t.Fatalf("%q at %d is %+v, %v, want that of epoch %d", key, at, v, ok, want)
	}
}

// TestLongChainsAreReadAtEveryEpochHoweverTheyArePruned: two keys are overwritten in turn, and pruned in all ways, so that
// versions of one take the memory of the other's. Each read finds what the chain without its skip links has.
func TestLongChainsAreReadAtEveryEpochHoweverTheyArePruned(t *testing.T) {
	tab := mustNew(t, tiny())
	rng := rand.New(rand.NewPCG(3, 4))
	names := [][]byte{[]byte("pa"), []byte("pb")}
	var (
		in      = Inserter{Ordered: true}
		b       batch.Builder
		r       Retired
		value   []byte
		e       keys.Epoch
		horizon keys.Epoch // min visible so far
		links   int
	)
	for round := range 60 {
		for range 50 + rng.IntN(600) {
			e += 1 + keys.Epoch(rng.IntN(3))
			value = epochValue(value, e)
			putOne(t, tab, &in, &b, names[rng.IntN(2)], value, e)
		}
		if round%3 != 0 {
			horizon = max(horizon, e-min(e, keys.Epoch(rng.IntN(4000))))
			h := GCWatermarks{MinVisible: horizon, LowWatermark: e - keys.Epoch(rng.IntN(50))}
			h.LowWatermark = max(h.LowWatermark, h.MinVisible)
			if round%3 == 1 {
				h.Snapshots = []keys.Epoch{h.MinVisible, h.LowWatermark}
				for range rng.IntN(500) {
					h.Snapshots = append(h.Snapshots, h.MinVisible+keys.Epoch(rng.IntN(int(h.LowWatermark-h.MinVisible)+1)))
				}
				slices.Sort(h.Snapshots)
			}
			for _, name := range names {
				tab.Prune(chainOf(tab, name), &h, &r)
				tab.Reclaim(&r) // there is no reader
			}
		}
		for _, name := range names {
			left := epochsOf(tab, name)
			for range 300 {
				at, want := horizon+keys.Epoch(rng.IntN(int(e-horizon)+1)), keys.Epoch(0)
				if i := slices.IndexFunc(left, func(e keys.Epoch) bool { return e <= at }); i >= 0 {
					want = left[i]
				}
				checkRead(t, tab, name, at, want)
			}
			node := tab.node(name)
			checkSkips(tab.arena.base, node)
			links += countLinks(tab, node)
		}
	}
	if links < 500 {
		t.Errorf("%d links seen: the test tests little", links)
	}
	checkTable(t, tab)
}

// countLinks is how many links of a chain lead somewhere.
func countLinks(tab *Table, node uint32) (n int) {
	base := tab.arena.base
	for v := offsetIn(word64(base, node).Load()); v != 0; v = versionOlder(base, v).Load() {
		if hasSkip(base, v) {
			if target, _ := skipTarget(base, v); target != 0 {
				n++
			}
		}
	}
	return n
}

// stepsTo is how many versions a read at an epoch passes.
func stepsTo(tab *Table, node uint32, at keys.Epoch) (steps int) {
	base := tab.arena.base
	for v := offsetIn(word64(base, node).Load()); v != 0 && versionTrailer(base, v).Epoch() > at; steps++ {
		older := uint32(0)
		if hasSkip(base, v) {
			older = skipPast(base, v, at)
		}
		if older == 0 {
			older = versionOlder(base, v).Load()
		}
		v = older
	}
	return steps
}

// TestReadsOfOldVersionsTakeStepsLikeALogarithm, also after versions were unlinked from the chain.
func TestReadsOfOldVersionsTakeStepsLikeALogarithm(t *testing.T) {
	const versions = 100_000
	tab := mustNew(t, Config{Bytes: 16 << 20, Prefix: []byte("p")})
	key := []byte("pk")
	in := Inserter{Ordered: true}
	var b batch.Builder
	for e := keys.Epoch(1); e <= versions; e++ {
		putOne(t, tab, &in, &b, key, nil, e)
	}
	check := func(count int) {
		t.Helper()
		node, most := tab.node(key), 0
		for at := keys.Epoch(1); at <= versions; at += 97 {
			most = max(most, stepsTo(tab, node, at))
		}
		// Two steps along links for each bit, as many stretches to the next link, and the end without links.
		if bound := 2*skipEvery*bits.Len(uint(count/skipEvery)) + skipFrom; most > bound {
			t.Errorf("a read among %d versions passes %d, want at most %d", count, most, bound)
		}
	}
	check(versions)
	h := GCWatermarks{MinVisible: 1, LowWatermark: versions}
	for e := keys.Epoch(1); e <= versions; e += 10 {
		h.Snapshots = append(h.Snapshots, e)
	}
	var r Retired
	tab.Prune(chainOf(tab, key), &h, &r)
	check(tab.Versions())
}

// TestReadersFollowSkipLinksWhileChainsArePruned: readers at old epochs, beside a writer and a collector that unlinks versions
// and gives their memory back once all readers of then have left.
func TestReadersFollowSkipLinksWhileChainsArePruned(t *testing.T) {
	const epochs, span = 20_000, 3000
	tab := mustNew(t, tiny())
	key := []byte("phot")
	var (
		visible atomic.Uint64
		reads   atomic.Uint64
		prunes  atomic.Uint64
		guard   sync.RWMutex // held by readers while they read
		mu      sync.Mutex   // of held, and while watermarks are taken
		held    [2]uint64
		wg      sync.WaitGroup
	)
	write := func(in *Inserter, b *batch.Builder, e uint64) {
		putOne(t, tab, in, b, key, epochValue(nil, keys.Epoch(e)), keys.Epoch(e))
		visible.Store(e)
	}
	var in Inserter
	in.Ordered = true
	var b batch.Builder
	for e := uint64(1); e <= span; e++ {
		write(&in, &b, e)
	}
	for i := range held {
		held[i] = 1
	}
	wg.Go(func() {
		for e := uint64(span + 1); e <= epochs; e++ {
			write(&in, &b, e)
			for e < epochs && (reads.Load() < e-span || prunes.Load() < (e-span)/100) && !t.Failed() {
				runtime.Gosched()
			}
		}
	})
	for i := range held {
		wg.Go(func() {
			for visible.Load() < epochs {
				mu.Lock()
				held[i] = visible.Load() // no snapshot is opened below the low watermark
				at := keys.Epoch(held[i])
				mu.Unlock()
				for until := uint64(at) + span; visible.Load() < min(until, epochs); {
					guard.RLock()
					v, ok := tab.Get(key, at)
					good := ok && v.Epoch == at && binary.LittleEndian.Uint64(v.Value) == uint64(at)
					guard.RUnlock()
					if !good {
						t.Errorf("at %d is %+v, %v", at, v, ok)
						return
					}
					reads.Add(1)
				}
			}
		})
	}
	wg.Go(func() {
		var r Retired
		for n := 0; visible.Load() < epochs; n++ {
			mu.Lock()
			now := keys.Epoch(visible.Load())
			h := GCWatermarks{MinVisible: keys.Epoch(min(held[0], held[1])), LowWatermark: now}
			if n%2 == 0 {
				h.Snapshots = []keys.Epoch{keys.Epoch(held[0]), keys.Epoch(held[1])}
				for e := h.MinVisible; e < h.LowWatermark; e += 3 {
					h.Snapshots = append(h.Snapshots, e)
				}
				slices.Sort(h.Snapshots)
			}
			mu.Unlock()
			tab.Prune(chainOf(tab, key), &h, &r)
			guard.Lock() // the readers of before have left
			tab.Reclaim(&r)
			guard.Unlock()
			prunes.Add(1)
		}
	})
	wg.Wait()
	checkTable(t, tab)
	checkSkips(tab.arena.base, tab.node(key))
}

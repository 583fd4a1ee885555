package memtable

import (
	"bytes"
	"errors"
	"fmt"
	"testing"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

func TestLargestKeysAndValuesFit(t *testing.T) {
	tab := mustNew(t, Config{Bytes: 1 << 20, Prefix: []byte("p")})
	var in Inserter
	var b batch.Builder
	for i, size := range []struct{ key, value int }{{1, 0}, {16 << 10, 0}, {16 << 10, 16 << 20}, {2, 20 << 20}, {3, 511}, {3, 4096}} {
		key, value := bytes.Repeat([]byte{'p'}, size.key), bytes.Repeat([]byte{byte(i + 1)}, size.value)
		putOne(t, tab, &in, &b, key, value, keys.Epoch(i+1))
		if v, ok := tab.Get(key, keys.MaxEpoch); !ok || !bytes.Equal(v.Value, value) {
			t.Errorf("key of %d bytes: %v, %d bytes of value", size.key, ok, len(v.Value))
		}
	}
	checkTable(t, tab)
}

func TestApplyStaysWithinWhatMaxSizeSays(t *testing.T) {
	c := tiny()
	c.layout.slots = slotsMax
	tab := mustNew(t, c)
	var in Inserter
	var b batch.Builder
	for i := range 3000 {
		b.Reset()
		for k := range 1 + i%90 {
			key := fmt.Sprintf("%06d-%d", (i*7919)%1_000_000, k)
			b.Set('p', []byte(key), make([]byte, i%700))
		}
		body, err := b.Finish()
		if err == nil {
			err = tab.Secure(&in, MaxSize(body))
		}
		if errors.Is(err, ErrFull) {
			break
		}
		before := tab.Bytes()
		if err == nil {
			err = tab.Apply(&in, body, keys.Epoch(i+1), false)
		}
		if err != nil {
			t.Fatal(err)
		}
		if tab.Bytes() != before {
			t.Fatalf("Apply %d of %d bytes took %d bytes beyond what was secured", i, body.Size(), tab.Bytes()-before)
		}
	}
	checkTable(t, tab)
}

func TestFullTableRefusesAndStaysReadable(t *testing.T) {
	c := tiny()
	c.layout.reserveBytes = marginBytes + 256<<10
	tab := mustNew(t, c)
	var in Inserter
	var b batch.Builder
	n := 0
	for ; ; n++ {
		key := numberedKey(n)
		b.Reset()
		b.Set('p', key[1:], make([]byte, 100))
		body, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		if err = tab.Secure(&in, MaxSize(body)); errors.Is(err, ErrFull) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := tab.Apply(&in, body, keys.Epoch(n+1), false); err != nil {
			t.Fatal(err)
		}
	}
	if n < 500 || tab.Count() != n {
		t.Errorf("%d keys went in, %d are there", n, tab.Count())
	}
	if err := tab.Secure(&in, int(c.layout.reserveBytes)); !errors.Is(err, ErrFull) {
		t.Errorf("a body larger than the arena: %v", err)
	}
	checkTable(t, tab)
}

func TestRunsLeaveFullBlocks(t *testing.T) {
	const n = 20_000
	for _, order := range []struct {
		name string
		key  func(i int) int
	}{
		{"ascending", func(i int) int { return i }},
		{"descending", func(i int) int { return n - i }},
		{"ascending in the middle", func(i int) int {
			if i < n/2 {
				return i * 1_000_000 // far apart, then a run between two of them
			}
			return 777_000_000 + i
		}},
	} {
		t.Run(order.name, func(t *testing.T) {
			tab := mustNew(t, Config{Bytes: 8 << 20, Prefix: []byte("p")})
			var in Inserter
			var b batch.Builder
			for i := range n {
				putOne(t, tab, &in, &b, fmt.Appendf(nil, "p%012d", order.key(i)), nil, keys.Epoch(i+1))
			}
			base, blocks := tab.arena.base, 0
			for x := tab.first; x != 0; x = offsetIn(towerLink(base, x, 0).Load()) {
				blocks++
			}
			if fill := float64(n) / float64(blocks*slotsMax); fill < 0.9 {
				t.Errorf("blocks are %.0f %% full", fill*100)
			}
			checkTable(t, tab)
		})
	}
}

func TestHotPathsAllocateNothing(t *testing.T) {
	tab := mustNew(t, Config{Bytes: 8 << 20, Prefix: []byte{byte(keys.SpaceUser)}})
	bodies := benchBodies(4000, 100)
	ks := benchKeysOf(bodies)
	var in Inserter
	i := 0
	if n := testing.AllocsPerRun(3000, func() { mustPut(tab, &in, bodies[i], keys.Epoch(i+1)); i++ }); n != 0 {
		t.Errorf("a put allocates %v times", n)
	}
	if n := testing.AllocsPerRun(1000, func() { tab.Get(ks[i%3000], keys.MaxEpoch); i++ }); n != 0 {
		t.Errorf("a get allocates %v times", n)
	}
	var it Iter
	it.Init(tab)
	if n := testing.AllocsPerRun(100, func() {
		for ok := it.SeekGE(ks[i%3000]); ok && i%50 != 0; ok = it.Next() {
			i++
		}
		it.SeekLT(ks[i%3000])
		it.Prev()
		i++
	}); n != 0 {
		t.Errorf("a scan allocates %v times", n)
	}
}

func TestHotWordsShareNoLine(t *testing.T) {
	const line = 64
	var a arena
	if tail := unsafe.Offsetof(a.tail); tail < cacheLinePair || unsafe.Sizeof(a)-tail < cacheLinePair {
		t.Errorf("the arena's tail is at %d of %d bytes", tail, unsafe.Sizeof(a))
	}
	if n := unsafe.Sizeof(stripe{}); n != cacheLinePair {
		t.Errorf("a stripe takes %d bytes", n)
	}
	tab := mustNew(t, tiny())
	if at := uintptr(tab.index.slots); at%line != 0 {
		t.Errorf("the index starts %d bytes into a line", at%line)
	}
	const pageBytes = 4 << 10
	if at := uintptr(tab.arena.base); at%pageBytes != 0 {
		t.Errorf("the arena starts %d bytes into a page", at%pageBytes)
	}
}

func TestInsertersGoFromTableToTable(t *testing.T) {
	var in Inserter
	var b batch.Builder
	for round := range 3 {
		tab := mustNew(t, tiny())
		var it Iter
		it.Init(tab)
		if it.First() || it.Last() || it.SeekGE([]byte("p")) || it.SeekLT([]byte("q")) {
			t.Fatalf("round %d starts with %q", round, it.Key())
		}
		for i := range 500 {
			putOne(t, tab, &in, &b, numberedKey(i*(round+1)), make([]byte, i%50), keys.Epoch(i+1))
		}
		if tab.Count() != 500 {
			t.Fatalf("round %d has %d keys", round, tab.Count())
		}
		checkTable(t, tab)
	}
}

func TestResetTableIsEmptyAndDropsOldInserters(t *testing.T) {
	tab, err := New(tiny())
	if err != nil {
		t.Fatal(err)
	}
	var in Inserter
	var b batch.Builder
	for round := range 4 {
		if tab.Count() != 0 || tab.Versions() != 0 {
			t.Fatalf("round %d starts with %d keys", round, tab.Count())
		}
		var it Iter
		it.Init(tab)
		if it.First() || it.Last() {
			t.Fatalf("round %d starts with %q", round, it.Key())
		}
		for i := range 500 {
			putOne(t, tab, &in, &b, numberedKey(i*(round+1)), make([]byte, i%50), keys.Epoch(i+1))
		}
		if round == 1 {
			putOne(t, tab, &in, &b, []byte("pbig"), make([]byte, 8<<20), 501)
		}
		checkTable(t, tab)
		if tab, err = tab.Reset(tiny()); err != nil {
			t.Fatal(err)
		}
	}
	if err := tab.Free(); err != nil {
		t.Fatal(err)
	}
}

func TestSizeClassesHoldWhatTheyName(t *testing.T) {
	last := 0
	check := func(n int) {
		class, words := classOf(uint32(n))
		need := uint32(versionHeaderBytes+n+wordBytes-1) / wordBytes
		if class < last || class >= classCount || words < need || words > need+need/classesPerDoubling+1 {
			t.Fatalf("value of %d bytes: class %d of %d, %d words for %d", n, class, classCount, words, need)
		}
		// A class is one size, so a version suits every request of its class.
		if whole := words*wordBytes - versionHeaderBytes; whole <= valueBytesMax {
			if c, w := classOf(whole); c != class || w != words {
				t.Fatalf("class %d of %d words holds class %d of %d", class, words, c, w)
			}
		}
		// A skip link takes two words more.
		if c, w := classOf(uint32(n) | versionSkips); c >= classCount || w < need+skipBytes/wordBytes {
			t.Fatalf("value of %d bytes with a skip link: class %d of %d, %d words for %d", n, c, classCount, w, need+skipBytes/wordBytes)
		}
		last = class
	}
	for n := range 100_000 {
		check(n)
	}
	for n := 100_000; n < valueBytesMax; n += n / 50 {
		check(n)
	}
	check(valueBytesMax)
}

func TestMalformedBodiesAreRefused(t *testing.T) {
	tab := mustNew(t, tiny())
	var in Inserter
	if err := tab.Secure(&in, 1<<12); err != nil {
		t.Fatal(err)
	}
	for _, body := range [][]byte{nil, {1, 0, 0}, {1, 0, 0, 0, 0, 0, 0, 0}, {1, 0, 0, 0, 9, 0, 0, 0}} {
		if err := tab.Apply(&in, batch.Contiguous(body), 1, false); !errors.Is(err, batch.ErrCorrupt) {
			t.Errorf("body %x: %v", body, err)
		}
	}
	if tab.Count() != 0 {
		t.Errorf("%d keys of damaged bodies", tab.Count())
	}
}

// TestFillingIsReportedAndPrefaultLeavesNothingToMap fills a table after all of its memory was
// mapped.
func TestFillingIsReportedAndPrefaultLeavesNothingToMap(t *testing.T) {
	filling := make(chan struct{}, 1)
	table := mustNew(t, Config{Bytes: 4 << 20, Prefix: []byte{byte(keys.SpaceUser)}, Filling: filling})
	if err := table.Prefault(); err != nil {
		t.Fatal(err)
	}
	mapped := table.arena.mapped.Load()
	if mapped*wordBytes < 4<<20 {
		t.Fatalf("%d bytes are mapped of %d", mapped*wordBytes, 4<<20)
	}
	var in Inserter
	told, atHalf := 0, false
	for i := 0; table.Bytes() < 4<<20; i++ {
		var b batch.Builder
		b.Set(keys.SpaceUser, fmt.Appendf(nil, "%08d", i), make([]byte, 1000))
		body, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		before := table.Bytes()
		mustPut(table, &in, body, keys.Epoch(i+1))
		select {
		case <-filling:
			told++
			if half := before < 2<<20 && table.Bytes() >= 2<<20; half {
				atHalf = table.HalfFull()
			}
		default:
		}
	}
	if steps := table.Bytes() / int(table.layout.stepBytes); !atHalf || told < steps-2 || told > steps+1 { // the first are the index's
		t.Errorf("told %d times for %d steps, when half was full: %v", told, steps, atHalf)
	}
	if after := table.arena.mapped.Load(); after > mapped+table.layout.stepBytes/wordBytes {
		t.Errorf("%d words were mapped, and then %d", mapped, after)
	}
}

// TestPrefaultAheadKeepsAFewStepsReady: not more of them, so that a table that is seldom written to
// takes little.
func TestPrefaultAheadKeepsAFewStepsReady(t *testing.T) {
	filling := make(chan struct{}, 1)
	table := mustNew(t, Config{Bytes: 64 << 20, Prefix: []byte{byte(keys.SpaceUser)}, Filling: filling})
	ahead := func() {
		t.Helper()
		for {
			if more, err := table.PrefaultAhead(); err != nil {
				t.Fatal(err)
			} else if !more {
				return
			}
		}
	}
	var in Inserter
	ahead()
	for i := 0; table.Bytes() < 48<<20; i++ {
		step, mapped := table.arena.step, table.arena.mapped.Load()
		if most := table.arena.tail.Load() + (prefaultSteps+1)*step; mapped > most {
			t.Fatalf("%d words are mapped, and %d taken", mapped, table.arena.tail.Load())
		}
		var b batch.Builder
		b.Set(keys.SpaceUser, fmt.Appendf(nil, "%08d", i), make([]byte, 100_000))
		body, err := b.Finish()
		if err != nil {
			t.Fatal(err)
		}
		mustPut(table, &in, body, keys.Epoch(i+1))
		if after := table.arena.mapped.Load(); after != mapped {
			t.Fatalf("entry %d had to map memory itself", i)
		}
		select {
		case <-filling:
			ahead()
		default:
		}
	}
}

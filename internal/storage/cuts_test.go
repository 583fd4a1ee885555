package storage

import (
	"slices"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// TestMergesIntoAHotRangeAreDivided: the input of every merge is sampled, so that several workers can
// share a merge whose keys fall into a few leaves, whatever the size of the tree.
func TestMergesIntoAHotRangeAreDivided(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 4 << 20})
	b.put(0, 10_000, 100)
	b.checkpoint()
	if live := b.engine.pager.Stats().Live; live < 2*smallTreePages {
		t.Fatalf("the tree has only %d pages", live)
	}
	const hot = 6 * sampleEvery
	b.put(2000, 2000+hot, 20)
	ck, err := b.engine.pager.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer ck.Abort()
	active := b.engine.view.Load().active
	in := b.engine.mergeInput(ck, nil, nil, btree.Root{}, []*generation{active}, btree.Policy{})
	if len(in.Cuts.Keys) < 4 || len(in.Cuts.Keys) > 6 || !slices.IsSortedFunc(in.Cuts.Keys, slices.Compare) || in.Cuts.Least == 0 {
		t.Errorf("%d keys have the cuts %q, of which a partition needs %d", hot, in.Cuts.Keys, in.Cuts.Least)
	}
}

// BenchmarkSample is the time that a checkpoint takes for its sample, once for all of its memtables.
func BenchmarkSample(b *testing.B) {
	e := openBench(b, Options{MemoryBytes: 256 << 20, MemtableBytes: 16 << 20})
	e.put(0, 80_000, 20)
	active := e.engine.view.Load().active
	for b.Loop() {
		_ = sample([]*generation{active}, 1000)
	}
	b.ReportMetric(float64(active.mem.Count()), "keys")
}

// TestBlocksPassEachKeyOnce: steps from block to block pass every key of a memtable.
func TestBlocksPassEachKeyOnce(t *testing.T) {
	b := openBench(t, Options{MemoryBytes: 64 << 20, MemtableBytes: 4 << 20})
	b.put(0, 5000, 20)
	table := b.engine.view.Load().active.mem
	var it memtable.Iter
	it.Init(table)
	total, blocks := 0, 0
	for ok := it.First(); ok; blocks++ {
		var passed int
		passed, ok = it.NextBlock()
		total += passed
	}
	if total != table.Count() || blocks < 50 {
		t.Errorf("%d steps passed %d of %d keys", blocks, total, table.Count())
	}
}

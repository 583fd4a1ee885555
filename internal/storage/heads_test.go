package storage

import "testing"

// TestTablesToComeLearnFromTheActiveOne: the keys of these tests begin alike, and the first four bytes of all are the same.
func TestTablesToComeLearnFromTheActiveOne(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 32 << 20, MemtableBytes: 1 << 20})
	b.put(0, 3000, 100)
	b.engine.prepareTable()
	if b.engine.memory.pool.heads.Load() == nil {
		t.Fatal("nothing was learned")
	}
	for range 3 {
		b.put(1000, 6000, 20)
		b.checkpoint()
	}
	b.readAll(0, 6000)
	if kinds := b.found(); len(kinds) != 0 {
		t.Errorf("damage: %v", kinds)
	}
}

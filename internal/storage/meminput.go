package storage

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// memInput is the input of a merge: the versions of some immutable generations as one sorted stream, of each key the newest
// first.
//
// Generations hold disjoint ranges of epochs, so the versions of a key in a newer one all come before those in an older.
type memInput struct {
	tables []memtable.Iter // newest generation first
	live   []bool          // which of them are at an entry
}

var _ btree.Input = (*memInput)(nil)

func newMemInput(frozen []*generation) *memInput {
	in := &memInput{tables: make([]memtable.Iter, len(frozen)), live: make([]bool, len(frozen))}
	for i, g := range frozen {
		in.tables[i].Init(g.mem)
	}
	in.SeekGE(nil)
	return in
}

// SeekGE implements btree.Input.
func (in *memInput) SeekGE(key []byte) {
	for i := range in.tables {
		in.live[i] = in.tables[i].SeekNearGE(key)
	}
}

// Next implements btree.Input. Keys and values are in the memtables, and valid until these are freed.
func (in *memInput) Next(e *btree.Entry) bool {
	least := -1
	for i := range in.tables {
		if in.live[i] && (least < 0 || bytes.Compare(in.tables[i].Key(), in.tables[least].Key()) < 0) {
			least = i
		}
	}
	if least < 0 {
		return false
	}
	t := &in.tables[least]
	e.Key, e.Trailer, e.Value, e.Large = t.Key(), t.Trailer(), t.Value(), false
	in.live[least] = t.Next()
	return true
}

// Err implements btree.Input.
func (in *memInput) Err() error { return nil }

const (
	// sampleEvery is the distance of the keys at which a merge can be cut: some ten leaves of work.
	sampleEvery = 1024
	// sampledCutsMin is how many such keys there must be between neighbouring leaves of a large tree
	// before a merge is cut there. Keys that are spread over the tree are divided by its separators, and
	// the leaves at each cut would be rewritten for nothing.
	sampledCutsMin = 3
)

// sample takes keys of the largest generation, at which workers can share a merge that the tree's own separators do not divide.
// It looks at one key of each block.
func sample(frozen []*generation, keySizeMax int) (cuts [][]byte) {
	var largest *generation
	for _, g := range frozen {
		if largest == nil || g.mem.Count() > largest.mem.Count() {
			largest = g
		}
	}
	var it memtable.Iter
	it.Init(largest.mem)
	passed := 0
	for ok := it.First(); ok; {
		var n int
		n, ok = it.NextBlock()
		if passed += n; ok && passed >= sampleEvery && len(it.Key()) <= keySizeMax { // no page holds a longer separator
			cuts, passed = append(cuts, it.Key()), 0
		}
	}
	return cuts
}

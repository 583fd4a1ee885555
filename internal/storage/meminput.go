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
		in.live[i] = in.tables[i].SeekGE(key)
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

// sampleEvery is the distance of the keys at which a merge into a small tree is cut: some ten leaves of work.
const sampleEvery = 1024

// sample takes keys of the largest generation, at which workers can share a merge that the tree's own separators do not divide.
func sample(frozen []*generation, keySizeMax int) (cuts [][]byte) {
	var largest *generation
	for _, g := range frozen {
		if largest == nil || g.mem.Count() > largest.mem.Count() {
			largest = g
		}
	}
	var it memtable.Iter
	it.Init(largest.mem)
	n := 0
	for ok := it.First(); ok; ok = it.NextKey() {
		if n++; n%sampleEvery == 0 && len(it.Key()) <= keySizeMax { // no page holds a longer separator
			cuts = append(cuts, it.Key())
		}
	}
	return cuts
}

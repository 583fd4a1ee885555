package memtable

import "github.com/epochkv/epochkv/internal/keys"

// ChangedSince reports whether key has a version in (after, upTo]. The caller's snapshot at after keeps the chain
// walkable.
func (t *Table) ChangedSince(key []byte, after, upTo keys.Epoch) bool {
	n := t.node(key)
	return n != 0 && t.chainChanged(n, after, upTo)
}

// RangeChangedSince reports whether any key in [lo, hi) has a version in (after, upTo]; a nil hi is no bound. it is
// the caller's, to be used again. This is what validation of scanned ranges asks: it reads the table and nothing else.
func (t *Table) RangeChangedSince(it *Iter, lo, hi []byte, after, upTo keys.Epoch) bool {
	it.Init(t)
	for ok := it.SeekGE(lo); ok; ok = it.NextKey() {
		if hi != nil && string(it.Key()) >= string(hi) {
			return false
		}
		if t.chainChanged(it.node(), after, upTo) {
			return true
		}
	}
	return false
}

func (t *Table) chainChanged(node uint32, after, upTo keys.Epoch) bool {
	v := newestAt(t.arena.base, node, upTo)
	return v != 0 && versionTrailer(t.arena.base, v).Epoch() > after
}

package btree

import (
	"sync/atomic"
	"testing"
)

// TestLeavesThatTakeMuchAreDivided: a merge into a few leaves of a large tree has one partition for
// each cut, so that workers can share it. Input that is spread over the tree is divided by its separators
// alone, because a leaf at a cut would be rewritten for nothing.
func TestLeavesThatTakeMuchAreDivided(t *testing.T) {
	base := newStore(512)
	root := base.apply(t, base.mergeInput(Root{}, numbered(0, 20000, 1, 12), allVisible)).Root
	partitions := func(entries []Entry, every, least int) (count int64) {
		t.Helper()
		s := base.clone()
		in := s.mergeInput(root, entries, allVisible)
		for i := every; i < len(entries); i += every {
			in.Cuts.Keys = append(in.Cuts.Keys, entries[i].Key)
		}
		in.Workers, in.Cuts.Least = Always(2), least
		var seen atomic.Int64
		in.Progress = func(int) { seen.Add(1) }
		s.check(t, s.apply(t, in).Root)
		return seen.Load()
	}
	hot, spread := numbered(500, 200, 2, 12), numbered(0, 20000, 2, 12)
	if n := partitions(hot, 20, 3); n < 8 {
		t.Errorf("a hot range with 9 cuts has %d partitions", n)
	}
	divided, plain := partitions(spread, 400, 3), partitions(spread, len(spread), 3)
	if divided != plain {
		t.Errorf("spread input has %d partitions with few cuts, and %d without", divided, plain)
	}
	if n := partitions(spread, 400, 0); n <= plain {
		t.Errorf("without a least number, cuts made %d partitions of %d", n, plain)
	}
}

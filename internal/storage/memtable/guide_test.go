package memtable

import (
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
)

func guidedTable(t *testing.T, n int, key func(i int) []byte) *Table {
	t.Helper()
	tab := mustNew(t, tiny())
	var in Inserter
	var b batch.Builder
	for i := range n {
		putOne(t, tab, &in, &b, key(i), nil, keys.Epoch(i+1))
	}
	return tab
}

func TestGuidePointsCloseBelowEveryKey(t *testing.T) {
	tab := guidedTable(t, 5000, numberedKey)
	g := &tab.guide
	if n := uint32(g.cur.Load()); n < g.towers.Load()/16 {
		t.Fatalf("the guide knows %d of %d towers", n, g.towers.Load())
	}
	missed := 0
	for i := range 5000 {
		k := numberedKey(i)
		head := tab.heads.of(k)
		tower, low := g.find(tab.arena.base, head)
		if tower == 0 {
			missed++
			continue
		}
		anchor := nodeKey(tab.arena.base, towerAnchor(tab.arena.base, tower))
		if string(anchor) >= string(k) || tab.heads.of(anchor) != low {
			t.Fatalf("for %x the guide points to %x with head %x", k, anchor, low)
		}
	}
	if missed > 250 {
		t.Errorf("the guide has no answer for %d of 5000 keys", missed)
	}
	checkTable(t, tab)
}

func TestKeysThatHeadsCannotTellApartDoWithoutTheGuide(t *testing.T) {
	alike := func(i int) []byte { return fmt.Appendf(nil, "pthe same head %07d", (i*7919)%5000) }
	tab := guidedTable(t, 5000, alike)
	if tab.guide.cur.Load() == 0 {
		t.Fatal("no guide was drawn")
	}
	if tower, _ := tab.guide.find(tab.arena.base, tab.heads.of(alike(1))); tower != 0 {
		t.Errorf("the guide claims to know")
	}
	if tab.Count() != 5000 {
		t.Errorf("%d keys", tab.Count())
	}
	checkTable(t, tab)
}

func TestClusteredInsertsOutrunTheGuideAndAreFound(t *testing.T) {
	tab := guidedTable(t, 5000, func(i int) []byte {
		if i < 1000 {
			return numberedKey(i)
		}
		return fmt.Appendf(nil, "p\x80\x00%c%c%05d", i>>8, i, i) // between two keys of the first part
	})
	checkTable(t, tab)
}

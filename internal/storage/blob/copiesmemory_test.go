package blob

import (
	"runtime"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
)

// TestARebuildTakesTheMemoryOfTheTableTwice: docs/operations.md says so, and a control group has no more.
func TestARebuildTakesTheMemoryOfTheTableTwice(t *testing.T) {
	const n = 300_000
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	c := newCopies()
	for id := range uint64(n) {
		at := makeLocation(page.ID(id/4+10), int(id%4), 100, fragmentHead)
		if c.add(id, 0, fragmentCopy{1 << 40, at}) != at {
			t.Fatal(id)
		}
	}
	if took := heap() - before; took > 12*n {
		t.Errorf("%.1f bytes for each fragment beside the table", float64(took)/n)
	}
	second := makeLocation(1, 0, 100, fragmentHead)
	if c.add(7, makeLocation(page.ID(11), 3, 100, fragmentHead), fragmentCopy{2 << 40, second}) != second || len(c.others[7]) != 1 || c.others[7][0].checkpoint != 1<<40 {
		t.Errorf("a newer copy: %v", c.others[7])
	}
	runtime.KeepAlive(c)
}

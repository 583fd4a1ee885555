package baseline

import (
	"encoding/binary"
	"testing"
)

func TestPageCacheEvictsByItsPolicy(t *testing.T) {
	for _, c := range []struct {
		policy Policy
		visits []uint64
		loads  int
	}{
		{LRU, []uint64{1, 2, 3, 1, 4, 1, 3, 2}, 5},   // 4 evicts 2, the oldest; 2 is loaded again
		{Clock, []uint64{1, 2, 3, 4, 3, 1, 3, 4}, 5}, // 4 clears all bits and evicts 1; the next 1 evicts 2, since 3 was visited
		{LRU, []uint64{1, 2, 3, 1, 2, 3}, 3},
	} {
		loads := 0
		cache := NewPageCache(c.policy, 3, 8, func(id uint64, page []byte) {
			loads++
			binary.LittleEndian.PutUint64(page, id)
		})
		for _, id := range c.visits {
			if got := binary.LittleEndian.Uint64(cache.Visit(id)); got != id {
				t.Fatalf("page %d holds %d", id, got)
			}
		}
		if loads != c.loads {
			t.Errorf("policy %d, visits %v: %d loads, want %d", c.policy, c.visits, loads, c.loads)
		}
	}
}

package cache

import "math/bits"

// history remembers pages that were evicted a while ago, and how often each has come back. A page that returns has shown that it is
// wanted at intervals longer than COOL pages are kept, which its frame alone could never learn: without a history a loop over a little
// more than the cache hits nothing, and a Zipf mix loses one to two points (docs/adr/0012).
//
// It is a table of tags, direct-mapped by hash: a newer eviction overwrites an older one that shares its slot, so entries fade with
// age and nothing has to be swept. Guarded by the cache's mutex.
type history struct {
	slots []uint32 // tag | returns; zero: empty
	mask  uint64
}

const (
	// historyPerFrame is the number of slots for each frame. With 1 Zipf mixes and a new working set lose up to 4 points; with 4 so much
	// returns that a loop pays its own HOT pages away and hits nothing.
	historyPerFrame = 2
	returnsMax      = 3 // two bits
)

func newHistory(frames int) history {
	order := bits.Len(uint(historyPerFrame*frames - 1))
	return history{slots: make([]uint32, 1<<order), mask: 1<<order - 1}
}

// place is the slot of an id, and the tag that tells it from others there.
func (h *history) place(id ID) (slot *uint32, tag uint32) {
	x := uint64(id) * goldenBits
	x = (x ^ x>>32) * 0xd6e8feb86659fd93 // mixes the low bits too, which the multiplication alone does not
	return &h.slots[(x^x>>32)&h.mask], uint32(x>>32)&^returnsMax | 1<<31
}

// evicted remembers id, which had come back so many times.
func (h *history) evicted(id ID, returns uint8) {
	slot, tag := h.place(id)
	*slot = tag | uint32(returns)
}

// returned says how often id has come back by now, this time included: 0 if it is not remembered. It is forgotten then.
func (h *history) returned(id ID) uint8 {
	slot, tag := h.place(id)
	if *slot&^returnsMax != tag {
		return 0
	}
	returns := uint8(*slot & returnsMax)
	*slot = 0
	return min(returns+1, returnsMax)
}

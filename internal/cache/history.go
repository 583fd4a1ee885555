package cache

import "math/bits"

// history remembers pages that were evicted a while ago, and how often each has returned. A page
// that returns (a refault) has shown that it is used at intervals longer than the time for which
// cold pages are kept. Its frame alone could never learn that: without a history, a loop over a
// little more than the cache hits nothing, and a Zipf mix loses one to two points (ADR 0012).
//
// The history is a table of tags, direct-mapped by hash. A newer eviction overwrites an older one
// in the same slot, so entries disappear with age and no work is needed to remove them. Guarded by
// the cache's mutex.
type history struct {
	slots []uint32 // tag | returns; zero: empty
	mask  uint64
}

const (
	// historyPerFrame is the number of slots for each frame. With 1, Zipf mixes and a new working
	// set lose up to 4 points. With 4, so many pages count as refaults that a loop decrements its
	// own hot pages and hits nothing.
	historyPerFrame = 2
	returnsMax      = 3 // two bits
)

func newHistory(frames int) history {
	order := bits.Len(uint(historyPerFrame*frames - 1))
	return history{slots: make([]uint32, 1<<order), mask: 1<<order - 1}
}

// place returns the slot of an id, and the tag that distinguishes the id from others in that slot.
func (h *history) place(id ID) (slot *uint32, tag uint32) {
	x := uint64(id) * goldenBits
	x = (x ^ x>>32) * 0xd6e8feb86659fd93 // mixes the low bits too, which the multiplication alone does not do
	return &h.slots[(x^x>>32)&h.mask], uint32(x>>32)&^returnsMax | 1<<31
}

// evicted remembers id and how often it had returned.
func (h *history) evicted(id ID, returns uint8) {
	slot, tag := h.place(id)
	*slot = tag | uint32(returns)
}

// returned says how often id has returned by now, this time included, and removes its entry. The
// result is 0 if the history has no entry.
func (h *history) returned(id ID) uint8 {
	slot, tag := h.place(id)
	if *slot&^returnsMax != tag {
		return 0
	}
	returns := uint8(*slot & returnsMax)
	*slot = 0
	return min(returns+1, returnsMax)
}

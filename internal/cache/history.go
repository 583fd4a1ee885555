package cache

import "math/bits"

// history remembers pages that were evicted a while ago, and how many refaults each has had. A page
// with a refault has shown that it is used at intervals longer than the time for which cold pages
// are kept. Its frame alone could never learn that: without a history, a loop over a little more
// than the cache hits nothing, and a Zipf mix loses one to two points (ADR 0012).
//
// The history is a table of tags, direct-mapped by hash. A newer eviction overwrites an older one
// in the same slot, so entries disappear with age and no work is needed to remove them. Guarded by
// the cache's mutex.
type history struct {
	slots []uint32 // tag | refaults; zero: empty
	mask  uint64
}

const (
	// historyPerFrame is the number of slots for each frame. With 1, Zipf mixes and a new working
	// set lose up to 4 points. With 4, so many pages count as refaults that a loop decrements its
	// own hot pages and hits nothing.
	historyPerFrame = 2
	refaultsMax     = 3 // two bits
)

func newHistory(frames int) history {
	order := bits.Len(uint(historyPerFrame*frames - 1))
	return history{slots: make([]uint32, 1<<order), mask: 1<<order - 1}
}

// slotOf returns the slot of an id, and the tag that distinguishes the id from others in that slot.
func (h *history) slotOf(id ID) (slot *uint32, tag uint32) {
	x := uint64(id) * goldenBits
	x = (x ^ x>>32) * 0xd6e8feb86659fd93 // mixes the low bits too, which the multiplication alone does not do
	return &h.slots[(x^x>>32)&h.mask], uint32(x>>32)&^refaultsMax | 1<<31
}

// evicted remembers id and its refaults.
func (h *history) evicted(id ID, refaults uint8) {
	slot, tag := h.slotOf(id)
	*slot = tag | uint32(refaults)
}

// refaulted returns the number of refaults of id, this one included, and removes its entry. The
// result is 0 if the history has no entry.
func (h *history) refaulted(id ID) uint8 {
	slot, tag := h.slotOf(id)
	if *slot&^refaultsMax != tag {
		return 0
	}
	refaults := uint8(*slot & refaultsMax)
	*slot = 0
	return min(refaults+1, refaultsMax)
}

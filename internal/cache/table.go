package cache

import (
	"fmt"
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// table finds a page's frame. It is open-addressed, with linear probing and at most half full; a
// slot is one word:
//
//	63            24 23      0
//	+---------------+---------+
//	| page id       | frame   |   zero: empty
//	+---------------+---------+
//
// The word holds the whole id. So a reader that loads the word has its answer in one cache line and
// needs no second look at the frame. Writers hold the cache's mutex; readers take no lock. A
// removal moves later entries of its run back: it copies an entry and then clears the old slot. It
// leaves no tombstones. A reader that searches at the same time may miss an entry that is there,
// but never finds an entry that is not. A reader that misses looks again under the mutex.
type table struct {
	slots unsafe.Pointer
	shift uint8
	mask  uint64
	mem   backing
}

const (
	slotBytes  = 8
	frameBits  = 24
	framesMax  = 1<<frameBits - 1
	idMax      = ID(1)<<(64-frameBits) - 1
	frameMask  = 1<<frameBits - 1
	goldenBits = 0x9E3779B97F4A7C15 // 2^64 divided by the golden ratio: spreads neighbouring ids evenly
)

// BytesMax is the size of the largest cache of pages of this size: an entry of the table has
// frameBits bits for the number of a frame.
func BytesMax(pageSize int) int64 { return framesMax * int64(pageSize) }

func newTable(frames int) (*table, error) {
	order := bits.Len(uint(2*frames - 1))
	mem, err := reserve(slotBytes << order)
	if err != nil {
		return nil, fmt.Errorf("cache: table for %d frames: %w", frames, err)
	}
	mem.adviseHuge(slotBytes << order)
	return &table{slots: mem.base, shift: uint8(64 - order), mask: 1<<order - 1, mem: mem}, nil
}

func (t *table) slot(i uint64) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Add(t.slots, i*slotBytes))
}

func (t *table) home(id ID) uint64 { return uint64(id) * goldenBits >> t.shift }

// lookup is the hit path.
func (t *table) lookup(id ID) (frame uint32, ok bool) {
	for i := t.home(id); ; i = (i + 1) & t.mask {
		e := t.slot(i).Load()
		if e>>frameBits == uint64(id) {
			return uint32(e & frameMask), e != 0
		}
		if e == 0 {
			return 0, false
		}
	}
}

// insert adds an id that is not there.
func (t *table) insert(id ID, frame uint32) {
	i := t.home(id)
	for t.slot(i).Load() != 0 {
		i = (i + 1) & t.mask
	}
	t.slot(i).Store(uint64(id)<<frameBits | uint64(frame))
}

// remove takes out an id that is there.
func (t *table) remove(id ID) {
	hole := t.home(id)
	for t.slot(hole).Load()>>frameBits != uint64(id) {
		hole = (hole + 1) & t.mask
	}
	for i := (hole + 1) & t.mask; ; i = (i + 1) & t.mask {
		e := t.slot(i).Load()
		if e == 0 {
			break
		}
		// An entry may move back to the hole unless its home is after the hole.
		if (i-t.home(ID(e>>frameBits)))&t.mask >= (i-hole)&t.mask {
			t.slot(hole).Store(e)
			hole = i
		}
	}
	t.slot(hole).Store(0)
}

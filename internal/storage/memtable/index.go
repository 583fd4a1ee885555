package memtable

import (
	"sync/atomic"
	"unsafe"
)

// probeMax is how many slots a key may be away from where its hash points. At the planned load of at most one half a window
// is never full; when a table holds far more keys than planned, a full window costs four lines and then a descent.
const probeMax = 32

// index maps the hash of a key to its node: open addressing, linear probing, nothing is ever removed. A slot is the
// hash's high half beside the node's offset.
//
// Invariant: a slot between the place a hash points to and the slot that holds it was filled earlier and stays filled, so the first
// empty slot of a window says "not here", and only a window without one says "unknown".
type index struct {
	slots unsafe.Pointer // constant; probeMax slots longer than mask+1, so that a window never wraps
	mask  uint64         // constant
}

// indexWords is the size of the index of a table of n bytes: a power of two of slots, one for each 64 to 128 bytes. An entry
// with a 100-byte value takes about 200 bytes.
func indexWords(n int) (slots, words uint64) {
	slots = 64
	for slots*2*64 <= uint64(n) {
		slots *= 2
	}
	return slots, slots + probeMax
}

func (x *index) window(hash uint64) unsafe.Pointer {
	return unsafe.Add(x.slots, uintptr(hash&x.mask)*wordBytes)
}

// find returns the node of key, or zero and whether the index is sure that the key is not in the table.
func (x *index) find(base unsafe.Pointer, hash uint64, key []byte) (node uint32, sure bool) {
	p := x.window(hash)
	for range probeMax {
		w := (*atomic.Uint64)(p).Load()
		if w == 0 {
			return 0, true
		}
		if headIn(w) == uint32(hash>>32) && nodeHasKey(base, offsetIn(w), key) {
			return offsetIn(w), true
		}
		p = unsafe.Add(p, wordBytes)
	}
	return 0, false
}

// put publishes node under hash. Putting it again changes nothing; when the window is full it is left to the blocks.
func (x *index) put(hash uint64, node uint32) {
	p := x.window(hash)
	word := pack(uint32(hash>>32), node)
	for range probeMax {
		s := (*atomic.Uint64)(p)
		w := s.Load()
		if w == 0 {
			if s.CompareAndSwap(0, word) {
				return
			}
			w = s.Load()
		}
		if w == word {
			return
		}
		p = unsafe.Add(p, wordBytes)
	}
}

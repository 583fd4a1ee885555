package memtable

import (
	"sync/atomic"
	"unsafe"
)

const (
	// bucketSlots fill one cache line.
	bucketSlots = 8
	// bucketsMax is how many buckets a key may be spread over. At the planned load of at most two
	// thirds four of them are never full; when a table has far more keys than planned, full ones
	// cost four lines and then a descent.
	bucketsMax = 4
)

// index maps the hash of a key to its node. A slot has a tag, from the hash's high half, and the
// node's offset. Slots are in buckets of one cache line, and nothing is ever removed.
//
// A look-up compares all of a bucket and does not test slot by slot whether it is empty: the branch
// predictor cannot guess where a bucket ends, and a wrong guess there would keep the descent that
// follows from overlapping with this miss.
//
// Invariant: the slots of a key's buckets fill in order, so a bucket whose last slot is empty says
// "not here", and only bucketsMax full buckets say "unknown".
type index struct {
	slots unsafe.Pointer // constant, on a cache line; bucketsMax-1 buckets longer than mask+1, so that a probe never wraps
	mask  uint64         // in buckets; constant
}

// indexBuckets is the size of the index of a table of n bytes: a power of two of buckets, with one
// slot for each 64 to 128 bytes. An entry with a 100-byte value takes about 200 bytes.
func indexBuckets(n int) (addressed, all uint64) {
	addressed = 8
	for addressed*2*bucketSlots*64 <= uint64(n) {
		addressed *= 2
	}
	return addressed, addressed + bucketsMax - 1
}

func (x *index) bucket(hash uint64) unsafe.Pointer {
	return unsafe.Add(x.slots, uintptr(hash&x.mask)*bucketSlots*wordBytes)
}

// tagOf is never zero, so that an empty slot matches no tag.
func tagOf(hash uint64) uint32 { return uint32(hash>>32) | 1 }

// find returns the node of key, or zero and whether the index is sure that the key is not in the
// table.
func (x *index) find(base unsafe.Pointer, hash uint64, key []byte) (node uint32, sure bool) {
	p, tag, w := x.bucket(hash), tagOf(hash), uint64(0)
	for range bucketsMax {
		for range bucketSlots {
			w = (*atomic.Uint64)(p).Load()
			if headIn(w) == tag && nodeHasKey(base, offsetIn(w), key) {
				return offsetIn(w), true
			}
			p = unsafe.Add(p, wordBytes)
		}
		if w == 0 {
			return 0, true
		}
	}
	return 0, false
}

// prefetch loads the first line that find will read. The compiler never drops an atomic load as
// unused.
func (x *index) prefetch(hash uint64) { (*atomic.Uint64)(x.bucket(hash)).Load() }

// prefetchNode loads the lines of the node that find will probably return, and of its first
// version; memory ends at end. The second line may be a neighbour's, to which another goroutine is
// writing: the loaded value is not used.
func (x *index) prefetchNode(base unsafe.Pointer, hash, end uint64) {
	const line = 64 / wordBytes
	p, tag := x.bucket(hash), tagOf(hash)
	for range bucketSlots {
		if w := (*atomic.Uint64)(p).Load(); headIn(w) == tag {
			word64(base, offsetIn(w)).Load()
			if !watched && uint64(offsetIn(w))+line < end {
				word64(base, offsetIn(w)+line).Load()
			}
			return
		}
		p = unsafe.Add(p, wordBytes)
	}
}

// candidate returns the node that find will probably return, or zero and whether find will return zero.
func (x *index) candidate(hash uint64) (node uint32, absent bool) {
	p, tag, w := x.bucket(hash), tagOf(hash), uint64(0)
	for range bucketSlots {
		if w = (*atomic.Uint64)(p).Load(); headIn(w) == tag {
			return offsetIn(w), false
		}
		p = unsafe.Add(p, wordBytes)
	}
	return 0, w == 0
}

// put publishes node under hash. A second put of the same node changes nothing. If the buckets are
// full, the key is found through the blocks only.
func (x *index) put(hash uint64, node uint32) {
	p, word := x.bucket(hash), pack(tagOf(hash), node)
	for range bucketsMax * bucketSlots {
		slot := (*atomic.Uint64)(p)
		w := slot.Load()
		if w == 0 {
			if slot.CompareAndSwap(0, word) {
				return
			}
			w = slot.Load()
		}
		if w == word {
			return
		}
		p = unsafe.Add(p, wordBytes)
	}
}

package memtable

import (
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// Versions are allocated in size classes, so that what one leaves the next of about its size can take. Up to
// smallWordsMax words every size is a class of its own; above, each doubling has classesPerDoubling, which wastes an
// eighth at most.
const (
	smallWordsMax      = 64
	classesPerDoubling = 8
	// A value of valueBytesMax takes a little over 2^27 words.
	classCount = smallWordsMax + (27-6+1)*classesPerDoubling + 1
)

// classOf is the size class of a version with such a value, and the words it takes.
func classOf(valueBytes int) (class int, words uint32) {
	n := uint32(versionHeaderBytes+valueBytes+wordBytes-1) / wordBytes
	if n <= smallWordsMax {
		return int(n), n
	}
	// With n in (2^e, 2^(e+1)], its class is the multiple of 2^e/classesPerDoubling at or above it.
	e := bits.Len32(n-1) - 1
	unit := uint32(1) << e / classesPerDoubling
	steps := (n - 1<<e + unit - 1) / unit
	return smallWordsMax + (e-6)*classesPerDoubling + int(steps), 1<<e + steps*unit
}

// freeLists are stacks of free versions by class, linked through their older links. A head is a counter (high half)
// beside the offset: it changes with every pop and push, so that a CAS cannot mistake a block that came back for one that never left.
type freeLists [classCount]atomic.Uint64

// pop takes a free version of a class, or returns zero.
func (f *freeLists) pop(base unsafe.Pointer, class int) uint32 {
	for {
		head := f[class].Load()
		v := offsetIn(head)
		if v == 0 {
			return 0
		}
		// Another goroutine may have taken v by now and be writing it; then the counter has moved and the CAS fails.
		next := versionOlder(base, v).Load()
		if f[class].CompareAndSwap(head, pack(headIn(head)+1, next)) {
			return v
		}
	}
}

// push gives a version back. No reader may be standing on it or come to it.
func (f *freeLists) push(base unsafe.Pointer, v uint32) {
	class, _ := classOf(versionValueLen(base, v))
	for {
		head := f[class].Load()
		versionOlder(base, v).Store(offsetIn(head))
		if f[class].CompareAndSwap(head, pack(headIn(head)+1, v)) {
			return
		}
	}
}

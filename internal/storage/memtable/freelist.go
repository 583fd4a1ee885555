package memtable

import (
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// Versions are allocated in size classes, so that the memory of one can be reused for another of
// about its size. Up to smallWordsMax words every size is a class of its own; above, each doubling
// has classesPerDoubling, which wastes an eighth at most.
const (
	smallWordsMax      = 64
	classesPerDoubling = 8
	// A value of valueBytesMax takes a little over 2^27 words.
	classCount = smallWordsMax + (27-6+1)*classesPerDoubling + 1
)

// classOf is the size class of a version with such a length word (its flags matter), and the words it takes.
func classOf(length uint32) (class int, words uint32) {
	n := (versionHeaderBytes + length&^versionFlags + wordBytes - 1) / wordBytes
	if length&versionSkips != 0 {
		n += skipBytes / wordBytes
	}
	if n <= smallWordsMax {
		return int(n), n
	}
	// With n in (2^e, 2^(e+1)], its class is the multiple of 2^e/classesPerDoubling at or above it.
	e := bits.Len32(n-1) - 1
	unit := uint32(1) << e / classesPerDoubling
	steps := (n - 1<<e + unit - 1) / unit
	return smallWordsMax + (e-6)*classesPerDoubling + int(steps), 1<<e + steps*unit
}

const (
	// runLengthMax and runWordsMax bound a run, and with it the memory that one writer reserves: 4
	// KiB, less than its region.
	runLengthMax = 64
	runWordsMax  = 512
)

// freeLists are stacks of runs by class. A run is a few free versions of one class, which are freed
// together and taken together, so that most of them cost no atomic operation and no miss on the
// stack's head. With one version to an entry, pushing and popping took a fifth of an overwrite.
//
//	stack ─► head of a run ──older──► head of the next run ──► ...
//	             │ trailer word
//	             ▼
//	          version ──older──► version ──► 0
//
// A stack's word is a counter (high half) and the offset: it changes with every pop and push, so
// that a CAS cannot mistake a run that came back for one that never left.
type freeLists [classCount]atomic.Uint64

// pop takes a run of a class, linked through the older links from its first version to 0. It
// returns that version, or zero.
func (f *freeLists) pop(base unsafe.Pointer, class int) uint32 {
	for {
		head := f[class].Load()
		v := offsetIn(head)
		if v == 0 {
			return 0
		}
		// Another goroutine may have taken v by now and be writing it; then the counter has moved
		// and the CAS fails.
		next := versionOlder(base, v).Load()
		if f[class].CompareAndSwap(head, pack(headIn(head)+1, next)) {
			setOlder(base, v, uint32(*raw64(base, v)))
			return v
		}
	}
}

// push gives back the run of a class that starts with v and continues with second. No reader may be
// at it or reach it.
func (f *freeLists) push(base unsafe.Pointer, class int, v, second uint32) {
	*raw64(base, v) = uint64(second)
	for {
		head := f[class].Load()
		setOlder(base, v, offsetIn(head))
		if f[class].CompareAndSwap(head, pack(headIn(head)+1, v)) {
			return
		}
	}
}

// pushChain gives back every version from v to the end of its chain, in runs, and returns their
// number.
func (f *freeLists) pushChain(base unsafe.Pointer, v uint32) (freed int) {
	for v != 0 {
		class, words := classOf(versionLength(base, v))
		first, second := v, uint32(0)
		length, last := uint32(1), v
		for v = versionOlder(base, v).Load(); v != 0 && length < runLengthMax && (length+1)*words <= runWordsMax; length++ {
			if c, _ := classOf(versionLength(base, v)); c != class {
				break
			}
			if last == first {
				second = v
			}
			last, v = v, versionOlder(base, v).Load()
		}
		if last != first {
			setOlder(base, last, 0)
		}
		f.push(base, class, first, second)
		freed += int(length)
	}
	return freed
}

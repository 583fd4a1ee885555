package memtable

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"
)

// ErrFull means that a table's address space is used up: rotate and try again in the next table.
var ErrFull = errors.New("memtable: arena full")

// ErrStarved means that Apply found no memory: splits that the inserts of other writers caused have
// used up what is mapped for them in advance, and the system gave no more. A part of the body may
// be in the table and cannot be removed, so its epoch must never become visible.
var ErrStarved = errors.New("memtable: no memory in the middle of an insert")

const (
	wordBytes = 8
	// reservationBytesMax is what 32-bit offsets of 8-byte words can address. Reserving costs
	// address space, not memory.
	reservationBytesMax = 1 << 32 * wordBytes
	hugePageBytes       = 2 << 20
	// marginBytes of the reservation are kept for Apply, in case the splits of other writers cost
	// it more than Secure expected.
	marginBytes = 1 << 20
	// aheadBytes of that margin are mapped before every Secure returns: some sixty splits, for the
	// writers that are between Secure and the end of Apply. The next Secure maps as much again, so
	// that Apply does not depend on what the system can give.
	aheadBytes = 64 << 10
)

// arena is one reserved range of addresses whose first part is mapped. Offsets count 8-byte words
// from base; offset 0 is never allocated and means "none". Memory is granted by advancing tail and
// never returns to it.
type arena struct {
	base  unsafe.Pointer // constant
	limit uint64         // words reserved; constant
	step  uint64         // words mapped at a time; constant
	mem   backing        // constant

	obtain func(bytes uint64) error // constant; see Config.Obtain

	_      [cacheLinePair]byte
	tail   atomic.Uint64 // words granted. Invariant: tail <= mapped
	mapped atomic.Uint64 // words that are accessible and touched; grows under mu
	mu     sync.Mutex    // serialises growth; a leaf lock
	_      [cacheLinePair]byte
}

// cacheLinePair is 128: adjacent lines are fetched in pairs, so a neighbour's store on the pair
// still costs a miss.
const cacheLinePair = 128

// open reserves the arena. stepBytes is the unit of growth, a multiple of the page size.
func (a *arena) open(reserveBytes, stepBytes uint64) error {
	mem, base, err := reserve(reserveBytes, stepBytes >= hugePageBytes)
	if err != nil {
		return fmt.Errorf("memtable: reserve %d bytes: %w", reserveBytes, err)
	}
	a.mem, a.base = mem, base
	a.limit, a.step = reserveBytes/wordBytes, stepBytes/wordBytes
	a.tail.Store(blockAlign) // offset 0 means "none"; what follows starts on a cache line
	return nil
}

// takeOver makes a an empty arena in the memory of old. keepBytes and an eighth of it stay mapped.
func (a *arena) takeOver(old *arena, stepBytes, keepBytes uint64) error {
	if err := old.shrink(stepBytes, keepBytes); err != nil {
		return err
	}
	a.mem, a.base, a.limit, a.step = old.mem, old.base, old.limit, stepBytes/wordBytes
	a.mapped.Store(old.mapped.Load())
	a.tail.Store(blockAlign)
	old.base = nil // a use of the old table then faults at once
	return nil
}

// shrink leaves keepBytes and an eighth of it mapped. Nothing uses the arena meanwhile.
func (a *arena) shrink(stepBytes, keepBytes uint64) error {
	keep, mapped := (keepBytes+keepBytes/8)/stepBytes*stepBytes, a.mapped.Load()*wordBytes
	if mapped <= keep {
		return nil
	}
	if err := a.mem.discard(keep, mapped); err != nil {
		return fmt.Errorf("memtable: give back %d bytes: %w", mapped-keep, err)
	}
	a.mapped.Store(keep / wordBytes)
	return nil
}

// grant allocates words, mapped and touched. It leaves keepBack words of the reservation free, and
// fails with ErrFull if the rest is too small. A grant that fails has taken nothing.
func (a *arena) grant(words, keepBack uint64) (uint32, error) {
	for {
		at := a.tail.Load()
		end := at + words
		if end+keepBack > a.limit {
			return 0, ErrFull
		}
		if need := end + min(keepBack, aheadBytes/wordBytes); need > a.mapped.Load() {
			if err := a.grow(need); err != nil {
				return 0, err
			}
		}
		if a.tail.CompareAndSwap(at, end) {
			return uint32(at), nil
		}
	}
}

// mapAhead keeps the next aheadBytes after what was granted mapped.
func (a *arena) mapAhead() error {
	want := min(a.tail.Load()+aheadBytes/wordBytes, a.limit)
	if want <= a.mapped.Load() {
		return nil
	}
	return a.grow(want)
}

// grow maps and touches the arena up to end, rounded up to steps.
func (a *arena) grow(end uint64) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	from := a.mapped.Load()
	if end <= from {
		return nil
	}
	to := min((end+a.step-1)/a.step*a.step, a.limit)
	if a.obtain != nil {
		if err := a.obtain((to - from) * wordBytes); err != nil {
			return fmt.Errorf("memtable: grow to %d bytes: %w", to*wordBytes, err)
		}
	}
	if err := a.mem.populate(from*wordBytes, to*wordBytes); err != nil {
		return fmt.Errorf("memtable: grow to %d bytes: %w", to*wordBytes, err)
	}
	a.mapped.Store(to)
	return nil
}

// bytes is what has been granted so far.
func (a *arena) bytes() int { return int(a.tail.Load() * wordBytes) }

// word64 is the atomic word at offset off.
func word64(base unsafe.Pointer, off uint32) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Add(base, uintptr(off)*wordBytes))
}

// raw64 is the word at offset off, for words that are constant once published.
func raw64(base unsafe.Pointer, off uint32) *uint64 {
	return (*uint64)(unsafe.Add(base, uintptr(off)*wordBytes))
}

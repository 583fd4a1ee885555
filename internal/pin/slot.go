package pin

import (
	"sync/atomic"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// cacheLinePair is 128: the processor fetches adjacent lines in pairs, so a store to the other line
// of the pair still costs a miss.
const cacheLinePair = 128

// Slot is the registration of one reader. Only its owner writes it; collectors read it. A Slot is
// not for concurrent use.
type Slot struct {
	_     [cacheLinePair]byte
	tick  atomic.Uint64 // reclamation tick at Enter, zero outside an operation
	epoch atomic.Uint64 // snapshot epoch, zero without a snapshot
	reg   *Registry
	index int // index in the registry
	depth int // nested calls of Enter; only the owner reads and writes it
	_     [cacheLinePair - 5*8]byte
}

// Enter protects every shared object that the owner reaches from now until Leave. Calls nest.
func (s *Slot) Enter() {
	if s.depth++; s.depth == 1 {
		s.tick.Store(s.reg.tick.Load())
	}
}

// Leave ends the protection that Enter began.
func (s *Slot) Leave() {
	if s.depth--; s.depth == 0 {
		s.tick.Store(0)
	}
	if invariants.Enabled && s.depth < 0 {
		panic("pin: Leave without Enter")
	}
}

// Holds reports whether the slot protects an object that was retired at tick. Any goroutine may call it.
func (s *Slot) Holds(tick uint64) bool {
	t := s.tick.Load()
	return t != 0 && t <= tick
}

// OpenSnapshot registers a snapshot at the newest visible epoch and returns the epoch. The snapshot
// replaces the previous snapshot of the slot.
func (s *Slot) OpenSnapshot() keys.Epoch {
	for {
		e := s.reg.visible.Load()
		s.epoch.Store(max(e, 1)) // zero means "no snapshot"; what is needed at 0 is kept for a slot with 1, too
		if e >= s.reg.newestFloor.Load() {
			return keys.Epoch(e)
		}
	}
}

// OpenSnapshotAt registers a snapshot at a named epoch, and reports whether that epoch is still
// readable: it is at or above the GC low watermark, or another snapshot or a lease protects it. If
// the epoch is not readable, the slot holds nothing.
func (s *Slot) OpenSnapshotAt(e keys.Epoch) bool {
	s.epoch.Store(max(uint64(e), 1))
	if s.reg.readable(e, s) {
		return true
	}
	s.epoch.Store(0)
	return false
}

// CloseSnapshot ends the slot's snapshot, if it has one.
func (s *Slot) CloseSnapshot() {
	if s.epoch.Load() != 0 {
		s.epoch.Store(0)
	}
}

// Epoch is the snapshot epoch that the slot holds, or zero.
func (s *Slot) Epoch() keys.Epoch { return keys.Epoch(s.epoch.Load()) }

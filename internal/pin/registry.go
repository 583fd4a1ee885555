package pin

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/keys"
)

// chunkSlots is the number of slots that are allocated together: 16 KiB, which the Go heap aligns
// to a page.
const chunkSlots = 64

// Registry holds the slots and the snapshot leases. Taking and freeing a slot locks a mutex; using
// a slot does not.
type Registry struct {
	visible *atomic.Uint64 // the commit pipeline's word: the largest epoch up to which every commit is installed

	_            [cacheLinePair]byte
	tick         atomic.Uint64 // reclamation tick; every retirement advances it
	_            [cacheLinePair - 8]byte
	lowWatermark atomic.Uint64 // GC low watermark: this epoch and later ones are readable without a lease
	newestFloor  atomic.Uint64 // the least epoch of a snapshot that is not named: not below the low watermark
	minVisible   atomic.Uint64 // min-visible epoch, as of the last AdvanceLowWatermark
	_            [cacheLinePair - 24]byte

	// slots is replaced, never changed, so that scans need no lock.
	slots atomic.Pointer[[]*Slot]

	ids atomic.Uint64 // the newest id; see NextID

	mu            sync.Mutex // guards the fields below, and growth; it serializes AdvanceLowWatermark and OpenSnapshotAt of old epochs
	keepAll       bool       // see KeepAll
	free          []*Slot
	leases        leases
	system        []keys.Epoch   // of SystemEpochs
	retained      []keys.Epoch   // below the low watermark, ascending: epochs that every AdvanceLowWatermark so far has kept readable
	longSnapshots []longSnapshot // by slot: its snapshot below the low watermark, as of the last AdvanceLowWatermark
}

// longSnapshot is a snapshot below the low watermark, with the time at which AdvanceLowWatermark
// first found it there. Readers themselves note no time: most end before a caller asks for their
// age, and reading the clock would take as long as their read.
type longSnapshot struct {
	epoch uint64 // zero without a snapshot
	since time.Time
}

// NewRegistry makes a registry over the commit pipeline's visible word.
func NewRegistry(visible *atomic.Uint64) *Registry {
	r := &Registry{visible: visible, leases: newLeases()}
	r.tick.Store(1)
	r.slots.Store(new([]*Slot))
	return r
}

// Slot takes a slot for one owner. Slot.Free gives it back.
func (r *Registry) Slot() *Slot {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.free) == 0 {
		r.growLocked()
	}
	s := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	return s
}

func (r *Registry) growLocked() {
	chunk := make([]Slot, chunkSlots)
	old := *r.slots.Load()
	grown := make([]*Slot, len(old), len(old)+chunkSlots)
	copy(grown, old)
	for i := range chunk {
		chunk[i].reg, chunk[i].index = r, len(grown)
		grown = append(grown, &chunk[i])
		r.longSnapshots = append(r.longSnapshots, longSnapshot{})
		r.free = append(r.free, &chunk[i])
	}
	r.slots.Store(&grown)
}

// Free ends everything that the slot protects and gives the slot back to its registry.
func (s *Slot) Free() {
	s.depth = 0
	s.tick.Store(0)
	s.epoch.Store(0)
	s.reg.mu.Lock()
	s.reg.free = append(s.reg.free, s)
	s.reg.mu.Unlock()
}

// Retire is called after the last pointer to an object was replaced. The object may be reused when
// OldestTick is larger than tick.
func (r *Registry) Retire() (tick uint64) { return r.tick.Add(1) - 1 }

// OldestTick is the smallest reclamation tick that a slot holds. Objects that were retired before
// it may be reused. If no slot holds a tick, it is the current tick.
func (r *Registry) OldestTick() uint64 {
	oldest, _ := r.Oldest()
	return oldest
}

// Oldest is OldestTick, and the slot that holds it; nil if none does.
func (r *Registry) Oldest() (oldest uint64, holder *Slot) {
	oldest = r.tick.Load() // before the scan: a reader that enters later has at least this tick
	for _, s := range *r.slots.Load() {
		t := s.tick.Load()
		if invariants.Enabled && t > r.tick.Load() {
			panic(fmt.Sprintf("pin: slot %d entered at tick %d, and the newest is %d", s.index, t, r.tick.Load()))
		}
		if t != 0 && t < oldest {
			oldest, holder = t, s
		}
	}
	return oldest, holder
}

// readable reports whether e may be read now that a slot holds it. See the package comment.
//
// It is not enough that another slot holds e: its owner may have stored e too late, and may be
// about to find that out. Therefore every AdvanceLowWatermark so far must have kept e readable,
// too. No later call can pass e without seeing self.
func (r *Registry) readable(e keys.Epoch, self *Slot) bool {
	if uint64(e) >= r.lowWatermark.Load() {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, leased := r.leases.epochs[e]; leased {
		return true
	}
	if _, retained := slices.BinarySearch(r.retained, e); !retained {
		return false
	}
	for _, s := range *r.slots.Load() {
		if s != self && s.epoch.Load() == uint64(e) {
			return true
		}
	}
	return false
}

// NextID returns an id for a reader that prevents version GC. No id is given out twice; leases take
// theirs from the same sequence.
func (r *Registry) NextID() uint64 { return r.ids.Add(1) }

// KeepAll lets AdvanceLowWatermark return epoch 0 alone, so that every version is kept, or ends that. Which epochs are readable does not change. It begins
// before the first AdvanceLowWatermark, or never.
func (r *Registry) KeepAll(keep bool) {
	r.mu.Lock()
	r.keepAll = keep
	r.mu.Unlock()
}

// AdvanceLowWatermark publishes the GC low watermark: the smaller of visible and retained, where
// retained keeps past epochs readable without a snapshot or a lease. Then it scans the slots, ends
// leases whose deadline has passed, and recomputes the min-visible epoch. It returns the epochs for
// which versions must be kept, ascending and distinct, in dst: every epoch of a snapshot or lease
// below the low watermark, then the low watermark. A version is needed if it is newer than the low
// watermark, or if it is the newest version at or below one of the epochs.
func (r *Registry) AdvanceLowWatermark(dst []keys.Epoch, retained keys.Epoch, now time.Time) []keys.Epoch {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.lowWatermark.Load()
	lowWatermark := max(min(r.visible.Load(), uint64(retained)), before) // it never falls: unreadable epochs stay unreadable
	r.lowWatermark.Store(lowWatermark)
	r.newestFloor.Store(max(r.visible.Load(), lowWatermark))
	dst = r.snapshotEpochsLocked(dst, lowWatermark, now)
	r.retainLocked(dst[:len(dst)-1], keys.Epoch(before))
	if invariants.Enabled {
		r.checkLocked(dst, before)
	}
	if r.keepAll {
		dst = append(dst[:0], 0)
	}
	r.minVisible.Store(uint64(dst[0]))
	return dst
}

// checkLocked panics unless the epochs that AdvanceLowWatermark returns are ascending and distinct
// and end with the GC low watermark, which never falls and is never after visible.
func (r *Registry) checkLocked(epochs []keys.Epoch, before uint64) {
	last := uint64(epochs[len(epochs)-1])
	if last != r.lowWatermark.Load() || last < before || last > r.visible.Load() {
		panic(fmt.Sprintf("pin: the low watermark went from %d to %d, the epochs end at %d, and visible is %d", before, r.lowWatermark.Load(), last, r.visible.Load()))
	}
	for i := range epochs[1:] {
		if epochs[i] >= epochs[i+1] {
			panic(fmt.Sprintf("pin: needed epochs are not ascending: %d", epochs))
		}
	}
}

// snapshotEpochsLocked returns, in dst, the epochs of snapshots and leases below the low watermark,
// then the low watermark.
func (r *Registry) snapshotEpochsLocked(dst []keys.Epoch, lowWatermark uint64, now time.Time) []keys.Epoch {
	dst, r.system = dst[:0], r.system[:0]
	newestFloor := r.newestFloor.Load()
	for i, s := range *r.slots.Load() {
		e := s.epoch.Load()
		if e == 1 { // it may stand for epoch 0, see Slot.OpenSnapshot
			dst, r.system = appendBelow(dst, 0, lowWatermark), appendBelow(r.system, 0, newestFloor)
		}
		if e != 0 && e < newestFloor {
			r.system = append(r.system, keys.Epoch(e))
		}
		if e == 0 || e >= lowWatermark {
			r.longSnapshots[i].epoch = 0
			continue
		}
		dst = append(dst, keys.Epoch(e))
		if r.longSnapshots[i].epoch != e {
			r.longSnapshots[i] = longSnapshot{e, now}
		}
	}
	r.leases.expire(now)
	for e := range r.leases.epochs {
		dst = appendBelow(dst, uint64(e), lowWatermark)
	}
	slices.Sort(dst)
	dst = slices.Compact(dst)
	slices.Sort(r.system)
	r.system = append(slices.Compact(r.system), keys.Epoch(newestFloor))
	return append(dst, keys.Epoch(lowWatermark))
}

// appendBelow appends e if it is below limit.
func appendBelow(dst []keys.Epoch, e, limit uint64) []keys.Epoch {
	if e < limit {
		return append(dst, keys.Epoch(e))
	}
	return dst
}

// SystemEpochs returns, in dst, the epochs for which versions of the store's own records must be kept, as of the last
// AdvanceLowWatermark: neither the retention nor leases keep their past, and they are read in snapshots of the newest
// epoch.
func (r *Registry) SystemEpochs(dst []keys.Epoch) []keys.Epoch {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append(dst[:0], r.system...)
}

// retainLocked notes which of the needed epochs below the low watermark OpenSnapshotAt may grant:
// those that were readable until now. The other epochs are in the slots of readers that came too
// late for an earlier AdvanceLowWatermark and will give them up.
func (r *Registry) retainLocked(epochs []keys.Epoch, before keys.Epoch) {
	n := 0
	for _, e := range r.retained {
		if _, still := slices.BinarySearch(epochs, e); still {
			r.retained[n] = e
			n++
		}
	}
	r.retained = r.retained[:n]
	for _, e := range epochs {
		_, leased := r.leases.epochs[e]
		if e >= before || leased {
			r.retained = append(r.retained, e)
		}
	}
	slices.Sort(r.retained)
	r.retained = slices.Compact(r.retained)
}

// MinVisible is the smallest epoch that a snapshot, a lease or the retention time may still need,
// as of the last AdvanceLowWatermark. An old result is safe: it is never above the current one.
func (r *Registry) MinVisible() keys.Epoch { return keys.Epoch(r.minVisible.Load()) }

// LowWatermark is the GC low watermark: this epoch and all later ones are readable without a lease.
func (r *Registry) LowWatermark() keys.Epoch { return keys.Epoch(r.lowWatermark.Load()) }

// Usage describes the registry for metrics.
type Usage struct {
	Slots     int
	Snapshots int
	Leases    int
	Oldest    keys.Epoch    // epoch of the oldest open snapshot, zero without one
	OldestAge time.Duration // how long the first of Longest has prevented version GC
	Longest   []Snapshot    // at most longestMax snapshots that prevent version GC, the longest first
}

// Snapshot is an open snapshot that prevents GC of versions which no later snapshot needs.
type Snapshot struct {
	Slot  int // index of the session's slot
	Epoch keys.Epoch
	Age   time.Duration // since AdvanceLowWatermark first found it below the low watermark
}

// longestMax bounds the snapshots that Usage names: enough to find the readers that prevent GC.
const longestMax = 5

// Usage scans the slots.
func (r *Registry) Usage(now time.Time) Usage {
	r.mu.Lock()
	defer r.mu.Unlock()
	slots := *r.slots.Load()
	u := Usage{Slots: len(slots) - len(r.free), Leases: len(r.leases.epochs)}
	for i, s := range slots {
		e := s.epoch.Load()
		if e == 0 {
			continue
		}
		u.Snapshots++
		if u.Oldest == 0 || keys.Epoch(e) < u.Oldest {
			u.Oldest = keys.Epoch(e)
		}
		if r.longSnapshots[i].epoch == e {
			u.Longest = append(u.Longest, Snapshot{s.index, keys.Epoch(e), now.Sub(r.longSnapshots[i].since)})
		}
	}
	slices.SortFunc(u.Longest, func(a, b Snapshot) int { return cmp.Compare(b.Age, a.Age) })
	u.Longest = u.Longest[:min(len(u.Longest), longestMax)]
	if len(u.Longest) > 0 {
		u.OldestAge = u.Longest[0].Age
	}
	return u
}

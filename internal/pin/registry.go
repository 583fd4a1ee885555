package pin

import (
	"cmp"
	"fmt"
	"maps"
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

	_        [cacheLinePair]byte
	tick     atomic.Uint64 // reclamation tick; every retirement advances it
	_        [cacheLinePair - 8]byte
	frontier atomic.Uint64 // GC low watermark: this epoch and later ones are readable without a lease
	minimum  atomic.Uint64 // min-visible epoch, as of the last Refresh
	_        [cacheLinePair - 16]byte

	// slots is replaced, never changed, so that scans need no lock.
	slots atomic.Pointer[[]*Slot]

	ids atomic.Uint64 // the newest id; see NextID

	mu    sync.Mutex // guards the fields below, and growth; it serializes Refresh and SnapshotAt of old epochs
	free  []*Slot
	holds map[keys.Epoch]Hold
	kept  []keys.Epoch // below the low watermark, ascending: epochs that every Refresh so far has kept readable
	long  []long       // by slot: its snapshot below the low watermark, as of the last Refresh
}

// long is a snapshot below the low watermark, with the time at which a Refresh first found it
// there. Readers themselves note no time: most end before a caller asks for their age, and reading
// the clock would take as long as their read.
type long struct {
	epoch uint64 // zero without a snapshot
	since time.Time
}

// NewRegistry makes a registry over the commit pipeline's visible word.
func NewRegistry(visible *atomic.Uint64) *Registry {
	r := &Registry{visible: visible, holds: make(map[keys.Epoch]Hold)}
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
		chunk[i].reg, chunk[i].place = r, len(grown)
		grown = append(grown, &chunk[i])
		r.long = append(r.long, long{})
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
	oldest := r.tick.Load() // before the scan: a reader that enters later has at least this tick
	for _, s := range *r.slots.Load() {
		t := s.tick.Load()
		if invariants.Enabled && t > r.tick.Load() {
			panic(fmt.Sprintf("pin: slot %d entered at tick %d, and the newest is %d", s.place, t, r.tick.Load()))
		}
		if t != 0 && t < oldest {
			oldest = t
		}
	}
	return oldest
}

// readable reports whether e may be read now that a slot holds it. See the package comment.
//
// It is not enough that another slot holds e: its owner may have stored e too late, and may be
// about to find that out. Therefore every Refresh so far must have kept e, too. No later Refresh
// can pass e without seeing self.
func (r *Registry) readable(e keys.Epoch, self *Slot) bool {
	if uint64(e) >= r.frontier.Load() {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, held := r.holds[e]; held {
		return true
	}
	if _, kept := slices.BinarySearch(r.kept, e); !kept {
		return false
	}
	for _, s := range *r.slots.Load() {
		if s != self && s.epoch.Load() == uint64(e) {
			return true
		}
	}
	return false
}

// Hold is a snapshot lease: an epoch that stays readable without a slot.
type Hold struct {
	ID           uint64
	Epoch        keys.Epoch
	Since, Until time.Time
}

// NextID returns a number that names something that keeps versions. No number is given out twice;
// leases take theirs from the same sequence.
func (r *Registry) NextID() uint64 { return r.ids.Add(1) }

// Hold takes a snapshot lease: it keeps a readable epoch readable until the given time, for a
// reader that will come back with a resume token. holdsMax bounds the number of epochs with a
// lease; Hold reports false when the bound is reached. A slot of the caller holds e.
func (r *Registry) Hold(e keys.Epoch, until time.Time, holdsMax int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	h, ok := r.holds[e]
	if !ok && len(r.holds) >= holdsMax {
		return false
	}
	if !ok {
		h = Hold{ID: r.NextID(), Epoch: e, Since: time.Now()}
	}
	if until.After(h.Until) {
		h.Until = until
	}
	r.holds[e] = h
	return true
}

// Holds returns the snapshot leases, in no order.
func (r *Registry) Holds() []Hold {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.holds))
}

// EndHold ends a snapshot lease before its deadline. It reports false if there is no such lease.
func (r *Registry) EndHold(id uint64) (Hold, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for e, h := range r.holds {
		if h.ID == id {
			delete(r.holds, e)
			return h, true
		}
	}
	return Hold{}, false
}

// Refresh recomputes the min-visible epoch. It publishes the GC low watermark: the smaller of
// visible and retained, where retained keeps past epochs readable without a snapshot or a lease. It
// ends leases whose deadline has passed, and scans the slots. It returns the epochs for which
// versions must be kept, ascending and distinct, appended to dst: every epoch of a snapshot or
// lease below the low watermark, then the low watermark. A version is needed if it is newer than
// the low watermark, or if it is the newest version at or below one of the epochs.
func (r *Registry) Refresh(dst []keys.Epoch, retained keys.Epoch, now time.Time) []keys.Epoch {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.frontier.Load()
	frontier := max(min(r.visible.Load(), uint64(retained)), before) // it never falls: unreadable epochs stay unreadable
	r.frontier.Store(frontier)
	dst = r.liveLocked(dst, frontier, now)
	r.keepLocked(dst[:len(dst)-1], keys.Epoch(before))
	if invariants.Enabled {
		r.checkLocked(dst, before)
	}
	r.minimum.Store(uint64(dst[0]))
	return dst
}

// checkLocked panics unless the epochs that Refresh returns are ascending and distinct and end with
// the GC low watermark, which never falls and is never after visible.
func (r *Registry) checkLocked(epochs []keys.Epoch, before uint64) {
	last := uint64(epochs[len(epochs)-1])
	if last != r.frontier.Load() || last < before || last > r.visible.Load() {
		panic(fmt.Sprintf("pin: the low watermark went from %d to %d, the epochs end at %d, and visible is %d", before, r.frontier.Load(), last, r.visible.Load()))
	}
	for i := range epochs[1:] {
		if epochs[i] >= epochs[i+1] {
			panic(fmt.Sprintf("pin: needed epochs are not ascending: %d", epochs))
		}
	}
}

func (r *Registry) liveLocked(dst []keys.Epoch, frontier uint64, now time.Time) []keys.Epoch {
	dst = dst[:0]
	for i, s := range *r.slots.Load() {
		e := s.epoch.Load()
		if e == 0 || e >= frontier {
			r.long[i].epoch = 0
			continue
		}
		dst = append(dst, keys.Epoch(e))
		if r.long[i].epoch != e {
			r.long[i] = long{e, now}
		}
	}
	for e, h := range r.holds {
		switch {
		case now.After(h.Until):
			delete(r.holds, e)
		case uint64(e) < frontier:
			dst = append(dst, e)
		}
	}
	slices.Sort(dst)
	dst = slices.Compact(dst)
	return append(dst, keys.Epoch(frontier))
}

// keepLocked notes which of the needed epochs below the low watermark SnapshotAt may grant: those
// that were readable until now. The other epochs are in the slots of readers that came too late for
// an earlier Refresh and will give them up.
func (r *Registry) keepLocked(live []keys.Epoch, before keys.Epoch) {
	n := 0
	for _, e := range r.kept {
		if _, still := slices.BinarySearch(live, e); still {
			r.kept[n] = e
			n++
		}
	}
	r.kept = r.kept[:n]
	for _, e := range live {
		_, held := r.holds[e]
		if e >= before || held {
			r.kept = append(r.kept, e)
		}
	}
	slices.Sort(r.kept)
	r.kept = slices.Compact(r.kept)
}

// MinVisible is the smallest epoch that a snapshot, a lease or the retention time may still need,
// as of the last Refresh. An old result is safe: it is never above the current one.
func (r *Registry) MinVisible() keys.Epoch { return keys.Epoch(r.minimum.Load()) }

// Frontier is the GC low watermark: this epoch and all later ones are readable without a lease.
func (r *Registry) Frontier() keys.Epoch { return keys.Epoch(r.frontier.Load()) }

// Usage describes the registry for metrics.
type Usage struct {
	Slots     int
	Snapshots int
	Holds     int
	Oldest    keys.Epoch    // epoch of the oldest open snapshot, zero without one
	OldestAge time.Duration // how long the first of Longest has prevented version GC
	Longest   []Snapshot    // at most longestMax snapshots that prevent version GC, the longest first
}

// Snapshot is an open snapshot that may keep versions which no later snapshot needs.
type Snapshot struct {
	Slot  int // index of the session's slot
	Epoch keys.Epoch
	Age   time.Duration // since the first Refresh that found it below the low watermark
}

// longestMax bounds the snapshots that Usage names: enough to find the readers that prevent GC.
const longestMax = 5

// Usage scans the slots.
func (r *Registry) Usage(now time.Time) Usage {
	r.mu.Lock()
	defer r.mu.Unlock()
	slots := *r.slots.Load()
	u := Usage{Slots: len(slots) - len(r.free), Holds: len(r.holds)}
	for i, s := range slots {
		e := s.epoch.Load()
		if e == 0 {
			continue
		}
		u.Snapshots++
		if u.Oldest == 0 || keys.Epoch(e) < u.Oldest {
			u.Oldest = keys.Epoch(e)
		}
		if r.long[i].epoch == e {
			u.Longest = append(u.Longest, Snapshot{s.place, keys.Epoch(e), now.Sub(r.long[i].since)})
		}
	}
	slices.SortFunc(u.Longest, func(a, b Snapshot) int { return cmp.Compare(b.Age, a.Age) })
	u.Longest = u.Longest[:min(len(u.Longest), longestMax)]
	if len(u.Longest) > 0 {
		u.OldestAge = u.Longest[0].Age
	}
	return u
}

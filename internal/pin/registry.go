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

// chunkSlots is how many slots are allocated together: 16 KiB, which the Go heap aligns to a page.
const chunkSlots = 64

// Registry holds the slots and the holds. Taking and giving back a slot takes a mutex; using one does not.
type Registry struct {
	visible *atomic.Uint64 // newest epoch all of whose predecessors are installed; the commit pipeline's word

	_        [cacheLinePair]byte
	tick     atomic.Uint64 // advances with every retirement
	_        [cacheLinePair - 8]byte
	frontier atomic.Uint64 // epochs from here on are readable without being held
	minimum  atomic.Uint64 // min-visible as of the last Refresh
	_        [cacheLinePair - 16]byte

	// slots is replaced, never changed, so that scans need no lock.
	slots atomic.Pointer[[]*Slot]

	ids atomic.Uint64 // the newest id; see NextID

	mu    sync.Mutex // guards what follows, and growth; Refresh and late SnapshotAt exclude each other with it
	free  []*Slot
	holds map[keys.Epoch]Hold
	kept  []keys.Epoch // below the frontier, ascending: what every Refresh so far has kept readable
	long  []long       // by slot: what it held back at the last Refresh
}

// long is a snapshot below the frontier, and when a Refresh saw it there first. Readers themselves note no time: most are gone before anybody
// asks, and the clock would take as long as their read.
type long struct {
	epoch uint64 // zero without one
	since time.Time
}

// NewRegistry makes a registry over the commit pipeline's visible word.
func NewRegistry(visible *atomic.Uint64) *Registry {
	r := &Registry{visible: visible, holds: make(map[keys.Epoch]Hold)}
	r.tick.Store(1)
	r.slots.Store(new([]*Slot))
	return r
}

// Slot takes a slot for one owner. Free gives it back.
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

// Free ends whatever the slot protects and gives it back to its registry.
func (s *Slot) Free() {
	s.depth = 0
	s.tick.Store(0)
	s.epoch.Store(0)
	s.reg.mu.Lock()
	s.reg.free = append(s.reg.free, s)
	s.reg.mu.Unlock()
}

// Retire is called after the last pointer to an object was replaced. The object may be reused once OldestTick is larger than tick.
func (r *Registry) Retire() (tick uint64) { return r.tick.Add(1) - 1 }

// OldestTick is the smallest tick any reader entered at; what was retired before it may be reused. With no reader inside
// it is the current tick.
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
// That another slot holds e is not enough: its owner may have stored it too late, and be about to find out. So every Refresh must have
// kept e, too; none can go past it any more without seeing self.
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

// Hold is an epoch that stays readable without a slot.
type Hold struct {
	ID           uint64
	Epoch        keys.Epoch
	Since, Until time.Time
}

// NextID is a number for something that keeps versions, so that it can be named. No number is given out twice; holds have one, too.
func (r *Registry) NextID() uint64 { return r.ids.Add(1) }

// Hold keeps a readable epoch readable until the given time, for a reader that will come back (a scan's token). holdsMax
// bounds the number of epochs held; it reports false when the bound is reached. The caller holds e in a slot.
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

// Holds are the holds there are, in no order.
func (r *Registry) Holds() []Hold {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Values(r.holds))
}

// EndHold ends a hold before its time. It reports false if there is no such hold.
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

// Refresh recomputes min-visible: it publishes the frontier (the smaller of visible and retained; retained keeps past epochs
// readable with nobody holding them), ends holds whose time has passed, and scans the slots. It returns the epochs that
// versions must be kept for, ascending and distinct, appended to dst: every live snapshot below the frontier, then the
// frontier. A version is needed if it is newer than the frontier or the newest one at or below one of them.
func (r *Registry) Refresh(dst []keys.Epoch, retained keys.Epoch, now time.Time) []keys.Epoch {
	r.mu.Lock()
	defer r.mu.Unlock()
	before := r.frontier.Load()
	frontier := max(min(r.visible.Load(), uint64(retained)), before) // never back: what was unreadable stays so
	r.frontier.Store(frontier)
	dst = r.liveLocked(dst, frontier, now)
	r.keepLocked(dst[:len(dst)-1], keys.Epoch(before))
	if invariants.Enabled {
		r.checkLocked(dst, before)
	}
	r.minimum.Store(uint64(dst[0]))
	return dst
}

// checkLocked panics unless the epochs that Refresh returns are ascending and distinct and end with the GC low watermark,
// which never falls and is never after visible.
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

// keepLocked notes which of the live epochs below the frontier may be named: those that were readable until now. The others are
// in the slots of readers that came too late for an earlier Refresh and will give them up.
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

// MinVisible is the smallest epoch that a live snapshot, hold, or retention may still read, as of the last Refresh. Stale
// is safe: it is never above the truth.
func (r *Registry) MinVisible() keys.Epoch { return keys.Epoch(r.minimum.Load()) }

// Frontier is the epoch from which on everything is readable.
func (r *Registry) Frontier() keys.Epoch { return keys.Epoch(r.frontier.Load()) }

// Usage describes the registry for metrics.
type Usage struct {
	Slots     int
	Snapshots int
	Holds     int
	Oldest    keys.Epoch    // oldest live snapshot, zero without one
	OldestAge time.Duration // how long the one that has done so longest has held versions back
	Longest   []Snapshot    // the longestMax that have held versions back longest, the longest first
}

// Snapshot is one that keeps versions which others need no more.
type Snapshot struct {
	Slot  int // the session's
	Epoch keys.Epoch
	Age   time.Duration // since the first Refresh that found it behind
}

// longestMax bounds what Usage names: enough to find out who holds things up.
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

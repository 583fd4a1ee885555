package cache

import (
	"runtime"
	"slices"

	"github.com/epochkv/epochkv/internal/invariants"
	"github.com/epochkv/epochkv/internal/pin"
)

// state is the state of a frame.
type state uint8

const (
	stateAbsent   state = iota // above the cache's size
	stateFree                  // in pool.free
	stateReading               // a flight has it
	stateResident              // in the table
	stateRetired               // retired, and in the list of retired frames
)

// pool has the frames by state. The cache's mutex guards all of it.
type pool struct {
	count      uint32   // frames that the cache may use
	states     []state  // by frame
	ids        []ID     // by frame: its page, if resident
	refaults   []uint8  // by frame: refaults of its page
	replaced   []ID     // by frame: the page whose usage count its page took over; zero if none
	free       []uint32 // a stack
	retired    []retiredFrame
	resident   uint64   // frames in stateResident
	victims    []uint32 // scratch
	aboveLimit int      // frames from index count on that are still retired or reading
	wanted     uint64   // written pages that may take frames with fresh memory
	touched    uint32   // the frames below it have been taken once, so the machine has given memory for them

	// reserve is the number of frames that should be free or retired. It doubles after a shortage,
	// and shrinks with each pass of the hand.
	reserve    int
	reserveMin int
	reserveMax int
	passesSeen uint64

	holder *pin.Slot // the last reader for which retired frames had to wait; nil: none

	oldTables []oldTable // tables that Resize replaced, until their readers have left
}

// retired is a retired frame: it may be reused when no reader is inside that entered at tick or
// before.
type retiredFrame struct {
	tick  uint64
	frame uint32
}

const (
	// reserveFrames are kept evicted ahead of need where the cache is large enough: two windows of
	// a scanning reader.
	reserveFrames = 32
	// reserveShare and reserveShareMax bound the reserve: it starts with at most one frame in
	// reserveShare, and grows to at most one frame in reserveShareMax.
	reserveShare    = 32
	reserveShareMax = 8
)

func (p *pool) sizeReserve() {
	p.reserveMin = max(1, min(reserveFrames, int(p.count)/reserveShare))
	p.reserveMax = max(2, int(p.count)/reserveShareMax)
	p.reserve = p.reserveMin
}

// yieldsMax bounds how often a miss lets other goroutines run before it reads without a frame.
const yieldsMax = 3

// lockForFrames locks the mutex. If all evicted frames wait for readers, it first lets those
// readers run: where goroutines outnumber processors, one of them is often inside its guard without
// running. With reads from the operating system's memory by 8 goroutines on 2 processors this took
// the pages read into the heap from 67 % to 24 %, and the time of a miss from 8.3 to 5 us.
func (c *Cache) lockForFrames() {
	for range yieldsMax {
		c.mu.Lock()
		if !c.noFrameLocked() {
			return
		}
		c.mu.Unlock()
		runtime.Gosched()
	}
	c.mu.Lock()
}

func (c *Cache) noFrameLocked() bool {
	if len(c.free) == 0 {
		c.reclaimLocked()
	}
	return len(c.free) == 0 && len(c.retired) >= c.reserveMax
}

// takeLocked takes a free frame for reading a page into it. If there is none, it evicts more, so
// that frames are free soon, and reports false.
func (c *Cache) takeLocked() (uint32, bool) {
	if len(c.free) == 0 {
		c.reclaimLocked()
	}
	if len(c.free) == 0 {
		c.counters.shortages++
		c.reserve = min(2*c.reserve, c.reserveMax)
		c.evictLocked(c.reserve - len(c.retired))
		c.reclaimLocked() // helps only a caller that is not inside a guard, such as a prefetcher
		if len(c.free) == 0 {
			return 0, false
		}
	}
	f := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	if invariants.Enabled {
		c.checkTakenLocked(f)
	}
	c.states[f] = stateReading
	c.touched = max(c.touched, f+1)
	if short := c.reserve - len(c.free) - len(c.retired); short > 0 {
		c.evictLocked(max(short, c.reserve/2)) // half of the reserve at a time, so that many frames share one retirement and one scan of the slots
	}
	return f, true
}

// evictLocked evicts and retires n victims, if the clock finds them.
func (c *Cache) evictLocked(n int) {
	if n <= 0 {
		return
	}
	c.victims = c.clock.victims(c.victims[:0], n)
	t := c.table.Load()
	for _, f := range c.victims {
		if invariants.Enabled {
			c.checkVictimLocked(t, f)
		}
		t.remove(c.ids[f])
		c.history.evicted(c.ids[f], c.refaults[f])
	}
	c.resident -= uint64(len(c.victims))
	c.retireLocked(c.victims)
	if passes := c.clock.counts().passes; passes != c.passesSeen {
		c.passesSeen = passes
		c.reserve = max(c.reserveMin, c.reserve*3/4)
	}
}

// retireLocked retires frames that are no longer in the table.
func (c *Cache) retireLocked(frames []uint32) {
	if len(frames) == 0 {
		return
	}
	tick := c.config.Registry.Retire()
	for _, f := range frames {
		c.states[f] = stateRetired
		c.retired = append(c.retired, retiredFrame{tick, f})
	}
}

// reclaimLocked frees the retired frames and tables that no reader can use any more.
func (c *Cache) reclaimLocked() {
	if len(c.retired) == 0 && len(c.oldTables) == 0 {
		return
	}
	if c.holder != nil && len(c.oldTables) == 0 && c.holder.Holds(c.retired[0].tick) {
		return // as long as it stays, without a look at thousands of slots and millions of frames
	}
	var oldest uint64
	oldest, c.holder = c.config.Registry.Oldest()
	n := 0
	for n < len(c.retired) && c.retired[n].tick < oldest {
		c.releaseLocked(c.retired[n].frame)
		n++
	}
	c.retired = slices.Delete(c.retired, 0, n)
	for len(c.oldTables) > 0 && c.oldTables[0].tick < oldest {
		_ = c.oldTables[0].table.mem.release() // the table was mapped, so unmapping cannot fail
		c.oldTables = c.oldTables[1:]
	}
}

// releaseLocked makes a frame free that no reader uses, or absent if the cache has shrunk.
func (c *Cache) releaseLocked(f uint32) {
	if invariants.Enabled {
		c.scribble(f)
	}
	if f < c.count {
		c.states[f] = stateFree
		c.free = append(c.free, f)
		return
	}
	c.states[f] = stateAbsent
	if c.aboveLimit--; c.aboveLimit == 0 {
		c.discardLocked()
	}
}

// discardLocked frees the memory above the cache's size, when no frame there is in use any more. It
// is advice: if it fails, Close frees the memory.
func (c *Cache) discardLocked() {
	c.touched = min(c.touched, c.count)
	const unit = machinePageBytesMax
	from := (int64(c.count)*int64(c.pageSize) + unit - 1) &^ (unit - 1)
	if to := int64(len(c.states)) * int64(c.pageSize) &^ (unit - 1); from < to {
		_ = c.frameMem.discard(from, to)
	}
}

// scribble overwrites a frame, so that a reader that uses it without protection reads wrong bytes.
func (c *Cache) scribble(f uint32) {
	p := c.frame(f)
	for i := range p {
		p[i] = 0xdb
	}
}

package cache

import (
	"sync/atomic"
	"unsafe"
)

// Warmth words, one for each frame. Readers raise them, the hand lowers them.
const (
	unvisited = 0          // prefetched, and nobody came yet
	coolest   = 1          // warmth 0: admitted, seen once
	hotAt     = 3          // warmth 2: from here on HOT
	absent    = ^uint32(0) // the frame holds no page; above every cap, so that nobody climbs here

	warmthBytes = 4
	lineBytes   = 64
)

// ceilings is how far each hint lets a page climb. Every ceiling is at most warmthMax, and the hand takes one step at a time down to
// coolest: whatever a hint can produce, it can reach. Two steps fewer for Default lose half a point on Zipf and more
// beside a scan; one more makes a new working set wait.
var ceilings = [hints]uint32{Default: hotAt + 3, VeryLow: coolest, Low: hotAt - 1, High: hotAt + 4, VeryHigh: warmthMax}

// warmthMax bounds the laps that it takes to cool the warmest page.
const warmthMax = hotAt + 5

// What cooling a HOT frame by one step costs, and what pages pay for it by arriving. Figures for other prices: docs/adr/0012.
const (
	stepCosts    = 16
	returnPays   = 10 // for the first return, twice as much for each further one
	strangerPays = 2  // for who has not been here lately: enough that a HOT set which nobody visits gives way in the end
)

// Shares of the frames, in percent.
const (
	// hotPercentMax of the frames may be HOT; a page that would cross waits in COOL. The rest is where new pages prove themselves and
	// where victims are found, so it also bounds how far the hand looks: 20 frames for a victim on Zipf, 37 on a loop.
	hotPercentMax = 96
	// coolFramesMin is that rest in a small cache.
	coolFramesMin = 4
	// Below hotPercentFull there is room, and nobody HOT needs to cool for those who return.
	hotPercentFull = 92
	// hotReach bounds the frames that the cooling hand looks at for one step.
	hotReach = 16
)

// clock decides which page is evicted: CLOCK with two bands. admit, remove, victims and resize are called under the cache's mutex,
// climb by readers.
//
//	           climb: one step per access, up to the hint's cap
//	        ───────────────────────────────────────────────►
//	admit ─► coolest   1   │   hotAt   +1   ...   warmthMax
//	evict ◄─      COOL     │             HOT
//	        ◄───────────   │   ◄───────────────────────────
//	        hand, each lap │   cooling hand, paid by who comes; or a whole lap without a victim
//
// A scan brings COOL pages and takes COOL pages, so that HOT ones outlive a scan of any length. A new working set shows itself by pages that
// return soon after their eviction: each of them pays for cooling HOT frames, more the oftener it came. What is still hot climbs back;
// what is not gives way. Invariant: hot is the number of words >= hotAt other than absent, but for readers inside climb.
type clock struct {
	words unsafe.Pointer // constant

	hotLimit atomic.Int64 // frames that may be HOT
	_        [2 * lineBytes]byte
	hot      atomic.Int64
	used     atomic.Uint64 // prefetched pages that somebody came for
	_        [2*lineBytes - 16]byte

	// Guarded by the cache's mutex.
	frames      uint32
	hotFull     int64
	hand        uint32 // takes and ages COOL
	coolingHand uint32 // cools HOT
	credit      uint32 // towards cooling, in parts of a step
	tally       tally
}

// tally counts what the clock did, and the HOT frames that it has.
type tally struct {
	evicted, wasted, used, cooled, laps, visited, hot uint64
}

func wordAt(words unsafe.Pointer, f uint32) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Add(words, uintptr(f)*warmthBytes))
}

func (k *clock) word(f uint32) *atomic.Uint32 { return wordAt(k.words, f) }

func (k *clock) counts() tally {
	t := k.tally
	t.used, t.hot = k.used.Load(), uint64(max(0, k.hot.Load()))
	return t
}

func (k *clock) resize(frames uint32) {
	k.frames = frames
	k.hand, k.coolingHand = k.hand%frames, k.coolingHand%frames
	k.hotFull = int64(frames) * hotPercentFull / 100
	k.hotLimit.Store(min(int64(frames)*hotPercentMax/100, int64(frames)-coolFramesMin))
}

// climb warms f by one step. Its caller has seen it below the ceiling, its hint's cap. Losing a race to another reader or to the hand loses one step.
func (k *clock) climb(f, ceiling uint32) {
	w := k.word(f)
	v := w.Load()
	if v >= ceiling {
		return
	}
	if v == hotAt-1 {
		if k.hot.Load() < k.hotLimit.Load() && w.CompareAndSwap(v, hotAt) {
			k.hot.Add(1)
		}
		return
	}
	if w.CompareAndSwap(v, v+1) && v == unvisited {
		k.used.Add(1)
	}
}

// arrival is how a page came.
type arrival struct {
	ahead   bool  // prefetched: no visit
	returns uint8 // times it has come back after eviction
}

// admit gives f, which holds a page from now on, its first warmth, and notes what its arrival pays towards cooling.
func (k *clock) admit(f, ceiling uint32, a arrival) {
	start := uint32(coolest)
	switch {
	case a.ahead:
		start = unvisited
	case ceiling < hotAt: // a scan pays nothing, however long it is
	case a.returns == 0:
		k.credit += strangerPays
	default:
		if k.hot.Load() > k.hotFull {
			k.credit += returnPays << (a.returns - 1)
		}
		if start = hotAt - 1; a.returns > 1 && k.hot.Load() < k.hotLimit.Load() {
			start = hotAt
			k.hot.Add(1)
		}
	}
	k.word(f).Store(start)
}

// remove makes f absent, whatever its warmth.
func (k *clock) remove(f uint32) {
	k.left(k.word(f).Swap(absent))
}

// left accounts for a word that was v and has become absent.
func (k *clock) left(v uint32) {
	switch {
	case v == unvisited:
		k.tally.wasted++
	case v >= hotAt && v != absent:
		k.hot.Add(-1)
	}
}

// victims appends up to n frames that it has made absent. It visits at most a lap, and warmthMax laps of cooling, for each.
func (k *clock) victims(dst []uint32, n int) []uint32 {
	k.payCredit()
	since := uint32(0) // the last victim
	for want := len(dst) + n; len(dst) < want && since <= (warmthMax+1)*k.frames; {
		f := k.hand
		if k.hand++; k.hand == k.frames {
			k.hand = 0
			k.tally.laps++
		}
		k.tally.visited++
		since++
		w := k.word(f)
		switch v := w.Load(); {
		case v == absent:
		case v <= coolest:
			if w.CompareAndSwap(v, absent) {
				k.left(v)
				k.tally.evicted++
				dst = append(dst, f)
				since = 0
			}
		case v < hotAt:
			w.CompareAndSwap(v, v-1)
		case since > k.frames:
			k.cool(w, v)
		}
	}
	return dst
}

// payCredit cools HOT frames for the pages that have arrived since.
func (k *clock) payCredit() {
	for ; k.credit >= stepCosts; k.credit -= stepCosts {
		k.coolNext()
	}
}

// coolNext cools the next HOT frame within the cooling hand's reach.
func (k *clock) coolNext() {
	for range hotReach {
		w := k.word(k.coolingHand)
		if k.coolingHand++; k.coolingHand == k.frames {
			k.coolingHand = 0
		}
		if v := w.Load(); v >= hotAt && v != absent {
			k.cool(w, v)
			return
		}
	}
}

// cool takes one step off a HOT frame.
func (k *clock) cool(w *atomic.Uint32, v uint32) {
	if !w.CompareAndSwap(v, v-1) {
		return
	}
	k.tally.cooled++
	if v == hotAt {
		k.hot.Add(-1)
	}
}

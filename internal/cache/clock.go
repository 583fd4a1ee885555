package cache

import (
	"sync/atomic"
	"unsafe"
)

// Usage counts, one for each frame. Readers increment them, the clock hand decrements them.
const (
	unvisited = 0          // prefetched, and not visited since
	coolest   = 1          // the lowest count of a visited page: admitted, seen once
	hotAt     = 3          // the hot threshold: frames at or above it are in the hot set
	absent    = ^uint32(0) // the frame holds no page; above every cap, so that no access increments it

	warmthBytes = 4
	lineBytes   = 64
)

// ceilings has the cap of the usage count for each hint. Every cap is at most warmthMax. The hand
// decrements by one at a time, down to coolest: so it can undo every count that a hint can produce.
// A cap of Default that is two lower loses half a point on Zipf, and more beside a scan; with a cap
// that is one higher a new working set takes over later.
var ceilings = [hints]uint32{Default: hotAt + 3, VeryLow: coolest, Low: hotAt - 1, High: hotAt + 4, VeryHigh: warmthMax}

// warmthMax is the largest usage count. It bounds the passes of the hand that take such a page to
// the lowest count.
const warmthMax = hotAt + 5

// The cost of decrementing the usage count of a hot frame by one, and the credit that an arriving
// page adds for it. ADR 0012 has the figures for other values.
const (
	stepCosts    = 16
	returnPays   = 10 // for the first refault, twice as much for each further one
	strangerPays = 2  // for a first-time page: enough to displace, in the end, a hot set without visits
)

// Shares of the frames, in percent.
const (
	// hotPercentMax of the frames may be hot; a page that would cross the limit stays in the cold
	// set. The other frames are where new pages prove themselves and where victims are found. So
	// the limit also bounds how many frames the hand examines: 20 for a victim on Zipf, 37 on a
	// loop.
	hotPercentMax = 96
	// coolFramesMin is the least number of those other frames, for a small cache.
	coolFramesMin = 4
	// Below hotPercentFull there is room in the hot set, and refaults need not decrement hot
	// frames.
	hotPercentFull = 92
	// hotReach bounds the frames that the cooling hand examines for one step.
	hotReach = 16
)

// clock decides which page is evicted: CLOCK with a hot set and a cold set. The cache's mutex is
// held during admit, remove, victims and resize; readers call climb without it.
//
//	           climb: one step per access, up to the hint's cap
//	        ───────────────────────────────────────────────►
//	admit ─► coolest   1   │   hotAt   +1   ...   warmthMax
//	evict ◄─   cold set    │            hot set
//	        ◄───────────   │   ◄───────────────────────────
//	   hand, in each pass  │   cooling hand, for credit; or the hand, after a pass without a victim
//
// A scan brings cold pages and evicts cold pages, so hot pages outlive a scan of any length. The
// pages of a new working set return soon after their eviction. Each such refault adds credit for
// decrementing hot frames, and more credit the more often the page has returned. Hot frames with
// visits get their count back; hot frames without visits become cold. Invariant: hot is the number
// of words >= hotAt other than absent, except for readers inside climb.
type clock struct {
	words unsafe.Pointer // constant

	hotLimit atomic.Int64 // frames that may be hot
	_        [2 * lineBytes]byte
	hot      atomic.Int64
	used     atomic.Uint64 // prefetched pages that were visited
	_        [2*lineBytes - 16]byte

	// Guarded by the cache's mutex.
	frames      uint32
	hotFull     int64
	hand        uint32 // evicts cold frames and decrements their counts
	coolingHand uint32 // decrements the counts of hot frames
	credit      uint32 // for decrementing hot frames, in parts of a step
	tally       tally
}

// tally counts what the clock did, and the hot frames that it has.
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

// climb increments the usage count of f by one. The caller has seen the count below the ceiling,
// which is the cap of its hint. If another reader or the hand changes the count at the same time,
// the increment is lost.
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

// arrival says how a page came into the cache.
type arrival struct {
	ahead   bool  // prefetched: not a visit
	returns uint8 // times that it has returned after eviction
}

// admit gives f, which holds a page from now on, its first usage count, and adds the credit of its
// arrival.
func (k *clock) admit(f, ceiling uint32, a arrival) {
	start := uint32(coolest)
	switch {
	case a.ahead:
		start = unvisited
	case ceiling < hotAt: // a scan adds no credit, however long it is
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

// remove makes f absent, whatever its usage count is.
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

// victims appends up to n frames that it has made absent. For each of them it examines the frames
// of one pass at most, and of warmthMax more passes if it has to decrement hot frames.
func (k *clock) victims(dst []uint32, n int) []uint32 {
	k.payCredit()
	since := uint32(0) // frames examined since the last victim
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

// payCredit decrements hot frames for the pages that have arrived since its last call.
func (k *clock) payCredit() {
	for ; k.credit >= stepCosts; k.credit -= stepCosts {
		k.coolNext()
	}
}

// coolNext decrements the next hot frame within the reach of the cooling hand.
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

// cool decrements the usage count of a hot frame by one.
func (k *clock) cool(w *atomic.Uint32, v uint32) {
	if !w.CompareAndSwap(v, v-1) {
		return
	}
	k.tally.cooled++
	if v == hotAt {
		k.hot.Add(-1)
	}
}

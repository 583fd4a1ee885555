package cache

import (
	"sync/atomic"
	"unsafe"
)

// Usage counts, one for each frame. Readers increment them, the clock hand decrements them.
const (
	unvisited = 0          // prefetched, and not visited since
	usageMin  = 1          // the lowest count of a visited page: admitted, seen once
	hotUsage  = 3          // the hot threshold: frames at or above it are in the hot set
	absent    = ^uint32(0) // the frame holds no page; above every cap, so that no access increments it

	usageBytes = 4
	lineBytes  = 64
)

// usageCaps has the cap of the usage count for each hint. Every cap is at most usageMax. The hand
// decrements by one at a time, down to usageMin: so it can undo every count that a hint can produce.
// A cap of Default that is two lower loses half a point on Zipf, and more beside a scan; with a cap
// that is one higher a new working set takes over later.
var usageCaps = [hints]uint32{Default: hotUsage + 3, VeryLow: usageMin, Low: hotUsage - 1, High: hotUsage + 4, VeryHigh: usageMax}

// usageMax is the largest usage count. It bounds the passes of the hand that take such a page to
// the lowest count.
const usageMax = hotUsage + 5

// The cost of decrementing the usage count of a hot frame by one, and the credit that an arriving
// page adds for it. ADR 0012 has the figures for other values.
const (
	decrementCost   = 16
	refaultCredit   = 10 // for the first refault, twice as much for each further one
	firstTimeCredit = 2  // for a first-time page: enough to displace, in the end, a hot set without visits
)

// Shares of the frames, in percent.
const (
	// hotPercentMax of the frames may be hot; a page that would cross the limit stays in the cold
	// set. The other frames are where new pages prove themselves and where victims are found. So
	// the limit also bounds how many frames the hand examines: 20 for a victim on Zipf, 37 on a
	// loop.
	hotPercentMax = 96
	// coldFramesMin is the least number of those other frames, for a small cache.
	coldFramesMin = 4
	// Below hotPercentFull there is room in the hot set, and refaults need not decrement hot
	// frames.
	hotPercentFull = 92
	// hotScanMax bounds the frames that the decrement hand examines for one decrement.
	hotScanMax = 16
)

// clock decides which page is evicted: CLOCK with a hot set and a cold set. The cache's mutex is
// held during admit, remove, victims and resize; readers call increment without it.
//
//	         increment: by one for each access, up to the hint's cap
//	         ───────────────────────────────────────────────►
//	admit ─► usageMin ...  │   hotUsage   +1   ...   usageMax
//	evict ◄─   cold set    │             hot set
//	         ◄──────────   │   ◄────────────────────────────
//	   hand, in each pass  │   decrement hand, for credit; or the hand, after a pass without a victim
//
// A scan brings cold pages and evicts cold pages, so hot pages outlive a scan of any length. The
// pages of a new working set are missed soon after their eviction. Each such refault adds credit
// for decrementing hot frames, and more credit the more refaults the page has had. Hot frames with
// visits get their count back; hot frames without visits become cold. Invariant: hot is the number
// of words >= hotUsage other than absent, except for readers inside increment.
type clock struct {
	words unsafe.Pointer // constant

	hotLimit atomic.Int64 // frames that may be hot
	_        [2 * lineBytes]byte
	hot      atomic.Int64
	used     atomic.Uint64 // prefetched pages that were visited
	_        [2*lineBytes - 16]byte

	// Guarded by the cache's mutex.
	frames        uint32
	hotFull       int64
	hand          uint32 // evicts cold frames and decrements their counts
	decrementHand uint32 // decrements the counts of hot frames
	credit        uint32 // for decrementing hot frames; one decrement takes decrementCost
	tally         tally
}

// tally counts what the clock did, and the hot frames that it has.
type tally struct {
	evicted, wasted, used, decremented, passes, examined, hot uint64
}

func wordAt(words unsafe.Pointer, f uint32) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Add(words, uintptr(f)*usageBytes))
}

func (k *clock) word(f uint32) *atomic.Uint32 { return wordAt(k.words, f) }

func (k *clock) counts() tally {
	t := k.tally
	t.used, t.hot = k.used.Load(), uint64(max(0, k.hot.Load()))
	return t
}

func (k *clock) resize(frames uint32) {
	k.frames = frames
	k.hand, k.decrementHand = k.hand%frames, k.decrementHand%frames
	k.hotFull = int64(frames) * hotPercentFull / 100
	k.hotLimit.Store(min(int64(frames)*hotPercentMax/100, int64(frames)-coldFramesMin))
}

// increment increments the usage count of f by one. The caller has seen the count below usageCap,
// the cap of its hint. If another reader or the hand changes the count at the same time, the
// increment is lost.
func (k *clock) increment(f, usageCap uint32) {
	w := k.word(f)
	v := w.Load()
	if v >= usageCap {
		return
	}
	if v == hotUsage-1 {
		if k.hot.Load() < k.hotLimit.Load() && w.CompareAndSwap(v, hotUsage) {
			k.hot.Add(1)
		}
		return
	}
	if w.CompareAndSwap(v, v+1) && v == unvisited {
		k.used.Add(1)
	}
}

// admission says how a page came into the cache.
type admission struct {
	prefetched bool  // the admission is not a visit
	refaults   uint8 // misses of the page soon after its eviction

	usage uint32 // of the page that it replaces; zero if it replaces none
}

// admit gives f, which holds a page from now on, its first usage count, and adds the credit of its
// admission.
func (k *clock) admit(f, usageCap uint32, a admission) {
	start := uint32(usageMin)
	switch {
	case a.prefetched:
		start = unvisited
	case a.usage > 0:
		if start = a.usage; start >= hotUsage && !k.enterHot() {
			start = hotUsage - 1
		}
	case usageCap < hotUsage: // a scan adds no credit, however long it is
	case a.refaults == 0:
		k.credit += firstTimeCredit
	default:
		if k.hot.Load() > k.hotFull {
			k.credit += refaultCredit << (a.refaults - 1)
		}
		if start = hotUsage - 1; a.refaults > 1 && k.hot.Load() < k.hotLimit.Load() {
			start = hotUsage
			k.hot.Add(1)
		}
	}
	k.word(f).Store(start)
}

// enterHot counts one more hot frame, if there may be one.
func (k *clock) enterHot() bool {
	if k.hot.Load() >= k.hotLimit.Load() {
		return false
	}
	k.hot.Add(1)
	return true
}

// handOver takes the usage count of f, whose page is about to be replaced, and leaves it at the
// lowest. The result is at least that. If a reader changes the count at the same time, f keeps it.
func (k *clock) handOver(f uint32) (usage uint32) {
	w := k.word(f)
	v := w.Load()
	if v <= usageMin || v == absent || !w.CompareAndSwap(v, usageMin) {
		return usageMin
	}
	if v >= hotUsage {
		k.hot.Add(-1)
	}
	return v
}

// giveBack undoes handOver with the usage count that the page in the place of f's page had, unless f has a
// larger one by now, or a reader changes it at the same time.
func (k *clock) giveBack(f, usage uint32) {
	w := k.word(f)
	v := w.Load()
	if usage == absent || v == absent || usage <= max(v, usageMin) {
		return
	}
	hotter := usage >= hotUsage && v < hotUsage
	if hotter && !k.enterHot() {
		usage, hotter = hotUsage-1, false
	}
	if !w.CompareAndSwap(v, usage) && hotter {
		k.hot.Add(-1)
	}
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
	case v >= hotUsage && v != absent:
		k.hot.Add(-1)
	}
}

// victims appends up to n frames that it has made absent. For each of them it examines the frames
// of one pass at most, and of usageMax more passes if it has to decrement hot frames.
func (k *clock) victims(dst []uint32, n int) []uint32 {
	k.spendCredit()
	since := uint32(0) // frames examined since the last victim
	for want := len(dst) + n; len(dst) < want && since <= (usageMax+1)*k.frames; {
		f := k.hand
		if k.hand++; k.hand == k.frames {
			k.hand = 0
			k.tally.passes++
		}
		k.tally.examined++
		since++
		w := k.word(f)
		switch v := w.Load(); {
		case v == absent:
		case v <= usageMin:
			if w.CompareAndSwap(v, absent) {
				k.left(v)
				k.tally.evicted++
				dst = append(dst, f)
				since = 0
			}
		case v < hotUsage:
			w.CompareAndSwap(v, v-1)
		case since > k.frames:
			k.decrement(w, v)
		}
	}
	return dst
}

// spendCredit decrements hot frames for the pages that have arrived since its last call.
func (k *clock) spendCredit() {
	for ; k.credit >= decrementCost; k.credit -= decrementCost {
		k.decrementNext()
	}
}

// decrementNext decrements the next hot frame among the next hotScanMax frames of the decrement hand.
func (k *clock) decrementNext() {
	for range hotScanMax {
		w := k.word(k.decrementHand)
		if k.decrementHand++; k.decrementHand == k.frames {
			k.decrementHand = 0
		}
		if v := w.Load(); v >= hotUsage && v != absent {
			k.decrement(w, v)
			return
		}
	}
}

// cool decrements the usage count of a hot frame by one.
func (k *clock) decrement(w *atomic.Uint32, v uint32) {
	if !w.CompareAndSwap(v, v-1) {
		return
	}
	k.tally.decremented++
	if v == hotUsage {
		k.hot.Add(-1)
	}
}

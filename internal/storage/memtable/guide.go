package memtable

import (
	"math"
	"sync/atomic"
	"unsafe"
)

const (
	// guideHeight is the height from which the guide knows a tower: every fourth of them.
	guideHeight = 3
	// guideWalkMax bounds the steps right from where the guide points. Inserts that all went to one
	// place since it was built, or keys whose heads are alike, exceed it; then the descent starts
	// from the top.
	guideWalkMax = 8
	// guideTowersMin is the number of towers below which a descent is short anyway.
	guideTowersMin = 64
)

// guide is a shortcut into the towers: a sorted array of heads with their towers, built anew
// whenever the number of towers has doubled. It only makes searches faster. In a skiplist's descent
// about every second branch is mispredicted; a search of a small dense array has no such branch,
// and leaves only the lowest levels to the descent.
//
//	guide at cur
//	0              count*4
//	+-------------+-------------+
//	| heads       | towers      |     32 bits each
//	+-------------+-------------+
type guide struct {
	cur    atomic.Uint64 // offset (high half) and count of the guide to use, zero before the first
	_      [cacheLinePair - 8]byte
	towers atomic.Uint32 // towers linked so far
	next   atomic.Uint32 // number of towers at which the next guide is built
	_      [cacheLinePair - 8]byte
}

// search returns the last tower of the guide whose anchor's head is below head, or zero.
func (g *guide) search(base unsafe.Pointer, head uint32) (tower uint32) {
	heads, towers := g.arrays(base)
	if len(heads) == 0 || heads[0] >= head {
		return 0
	}
	return towers[lastBelow(heads, head)]
}

func (g *guide) arrays(base unsafe.Pointer) (heads, towers []uint32) {
	cur := g.cur.Load()
	n := int(uint32(cur))
	if n == 0 {
		return nil, nil
	}
	at := unsafe.Add(base, uintptr(cur>>32)*wordBytes)
	return unsafe.Slice((*uint32)(at), n), unsafe.Slice((*uint32)(unsafe.Add(at, n*4)), n)
}

// lastBelow is the index of the last head below head; the first one is.
func lastBelow(heads []uint32, head uint32) int {
	lo, n := 0, len(heads)
	for n > 1 {
		half := n / 2
		if mid := lo + half; heads[mid] < head {
			lo = mid
		}
		n -= half
	}
	return lo
}

// find returns a tower of at least guideHeight whose anchor's head is low, which is below head,
// near the last such one; or zero if it knows none near enough.
func (g *guide) find(base unsafe.Pointer, head uint32) (tower, low uint32) {
	heads, towers := g.arrays(base)
	if len(heads) == 0 || heads[0] >= head {
		return 0, 0
	}
	at := lastBelow(heads, head)
	tower, low = towers[at], heads[at]
	for range guideWalkMax {
		link := towerLink(base, tower, guideHeight-1).Load()
		h := headIn(link)
		if h >= head {
			return tower, low
		}
		tower, low = offsetIn(link), h
	}
	return 0, 0
}

// buildGuide makes a new guide if it is due and no other goroutine is building one. It walks a
// quarter of the towers, so Secure does it and not Apply.
func (t *Table) buildGuide() {
	g := &t.guide
	due := g.next.Load()
	if g.towers.Load() < due || !g.next.CompareAndSwap(due, math.MaxUint32) {
		return
	}
	base, n := t.arena.base, 0
	for x := t.nextGuided(t.first); x != 0; x = t.nextGuided(x) {
		n++
	}
	at, err := t.arena.grant(uint64(n), marginBytes/wordBytes)
	if err != nil || n == 0 {
		return // a full table will be rotated soon
	}
	p := unsafe.Pointer(raw64(base, at))
	heads, towers := unsafe.Slice((*uint32)(p), n), unsafe.Slice((*uint32)(unsafe.Add(p, n*4)), n)
	x := t.first
	for i := range n { // towers linked meanwhile may push the last ones out
		link := towerLink(base, x, guideHeight-1).Load()
		x = offsetIn(link)
		heads[i], towers[i] = headIn(link), x
	}
	g.cur.Store(pack(at, uint32(n)))
	g.next.Store(2 * max(g.towers.Load(), due))
}

// nextGuided is the next tower that a guide has.
func (t *Table) nextGuided(x uint32) uint32 {
	return offsetIn(towerLink(t.arena.base, x, guideHeight-1).Load())
}

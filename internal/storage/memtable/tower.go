package memtable

import (
	"math"
	"math/bits"
	"sync/atomic"
	"unsafe"
)

// A tower is a skiplist node for one block.
//
//	0         4        8        16
//	+---------+--------+--------+--------+---
//	| block   | anchor | link 0 | link 1 | ...
//	+---------+--------+--------+--------+---
//
// anchor is the offset of the node whose key is the smallest the block may hold; constant. A link
// is head|offset of the next tower at its level, with the head of that tower's anchor.
const (
	// heightMax suits 2^24 towers at one half: a full arena of the smallest entries.
	heightMax    = 24
	towerMaxWord = 1 + heightMax

	// endLink ends every level: no key's head is above it, and its offset zero differs from that of
	// a tower with such a head.
	endLink = math.MaxUint32 << 32
)

func towerWords(height int) uint32 { return uint32(1 + height) }

func towerBlock(base unsafe.Pointer, tower uint32) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Add(base, uintptr(tower)*wordBytes))
}

func towerAnchor(base unsafe.Pointer, tower uint32) uint32 {
	return *(*uint32)(unsafe.Add(base, uintptr(tower)*wordBytes+4))
}

func towerLink(base unsafe.Pointer, tower uint32, level int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Add(base, (uintptr(tower)+1+uintptr(level))*wordBytes))
}

func writeTower(base unsafe.Pointer, tower, block, anchor uint32, height int) {
	p := unsafe.Add(base, uintptr(tower)*wordBytes)
	*(*uint32)(p) = block
	*(*uint32)(unsafe.Add(p, 4)) = anchor
	for l := range height {
		*(*uint64)(unsafe.Add(p, (1+l)*wordBytes)) = endLink
	}
}

// randomHeight draws a tower height with p = 1/2: with heads in the links a step to the right is
// what costs, and one half takes the fewest.
func randomHeight(rnd *uint64) int {
	x := *rnd
	x ^= x << 13
	x ^= x >> 7
	x ^= x << 17
	*rnd = x
	return min(1+bits.TrailingZeros64(x>>8|1<<(heightMax-1)), heightMax)
}

// bound says which towers a descent passes: those with anchor <= key, or with anchor < key.
type bound int

const (
	upTo  bound = 0
	below bound = -1
)

// passes reports whether the tower that link points to has an anchor within the bound, so that a
// search moves on to it. Hot loops compare the heads themselves, which decide nearly always, and
// call passesTie for the rest.
func passes(base unsafe.Pointer, link uint64, key []byte, head uint32, b bound) bool {
	h := headIn(link)
	return h < head || h == head && passesTie(base, link, key, b)
}

func passesTie(base unsafe.Pointer, link uint64, key []byte, b bound) bool {
	next := offsetIn(link)
	return next != 0 && compareNode(base, towerAnchor(base, next), key) <= int(b)
}

// descend returns the last tower whose anchor is within the bound, at the time its link was read.
func (t *Table) descend(key []byte, head uint32, b bound) uint32 {
	base, l := t.arena.base, guideHeight-1
	x, _ := t.guide.find(base, head)
	if x == 0 {
		x, l = t.first, int(t.height.Load())-1
	}
	for ; l >= 0; l-- {
		for {
			link := towerLink(base, x, l).Load()
			if h := headIn(link); h > head || h == head && !passesTie(base, link, key, b) {
				break
			}
			x = offsetIn(link)
		}
	}
	return x
}

// advanceRight moves right from x to the tower responsible for key and returns it with its block
// and its link.
//
// The block is loaded before the link. A split links first and swaps second. So if the block was
// already the left half, the link shows the right tower, and a key that moved there is not missed.
func advanceRight(base unsafe.Pointer, x uint32, key []byte, head uint32, b bound) (tower, block uint32, link uint64) {
	for {
		block = towerBlock(base, x).Load()
		link = towerLink(base, x, 0).Load()
		if !passes(base, link, key, head, b) {
			return x, block, link
		}
		x = offsetIn(link)
	}
}

// search finds key's node through the blocks, or zero.
func (t *Table) search(key []byte, head uint32) uint32 {
	base := t.arena.base
	_, block, _ := advanceRight(base, t.descend(key, head, upTo), key, head, upTo)
	for i := range t.slots {
		w := word64(base, block+1+uint32(i)).Load()
		if w == 0 {
			break
		}
		if headIn(w) == head && nodeHasKey(base, offsetIn(w), key) {
			return offsetIn(w)
		}
	}
	return 0
}

// last returns the last tower of the list.
func (t *Table) last() uint32 {
	base, x := t.arena.base, t.first
	for l := int(t.height.Load()) - 1; l >= 0; l-- {
		for link := towerLink(base, x, l).Load(); offsetIn(link) != 0; link = towerLink(base, x, l).Load() {
			x = offsetIn(link)
		}
	}
	return x
}

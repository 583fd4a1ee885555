package memtable

import "sync/atomic"

// split divides the full block of tower in two, or helps the goroutine that began to. When it
// returns, the block is no longer the tower's, unless in is starved: then the table is in the same
// consistent state as between the two steps below.
//
// The new tower gets the upper half and is linked after the old one first; swapping in the lower
// half second ends the split. Between the two steps nothing else can be linked after the tower,
// because the next split needs the next block.
func (t *Table) split(in *Inserter, s *splice, tower, block uint32) {
	base := t.arena.base
	var arrived, ordered [slotsMax]uint64
	n, sorted := loadBlock(base, block, t.slots, &arrived)
	ordered = arrived
	sortWords(base, ordered[:n], sorted)
	cut := cutAt(base, arrived[:n], ordered[:n], sorted)
	t.checkSplit(tower, ordered[:n], cut)

	// The link is read before the block is checked. If the block is still the tower's then, the
	// link is either the one from before this split or the one to its right half; the anchor tells
	// which.
	link := towerLink(base, tower, 0)
	next := link.Load()
	if towerBlock(base, tower).Load() != block {
		return
	}
	if offsetIn(next) == 0 || towerAnchor(base, offsetIn(next)) != offsetIn(ordered[cut]) {
		if !t.linkRight(in, s, link, next, ordered[cut:n]) {
			return
		}
	}
	s.levels = 0 // a search from the splice would start after the new tower
	undo := in.pos
	left := in.alloc(blockWords(t.slots), blockAlign)
	if left == 0 {
		return
	}
	writeBlock(base, left, t.slots, ordered[:cut])
	if !towerBlock(base, tower).CompareAndSwap(block, left) {
		in.retract(undo, left+blockWords(t.slots))
	}
}

// linkRight makes a tower of the upper half of a block and links it between link's tower and next.
// If link has changed since next was read, another goroutine has linked its own tower with the same
// half, and this one is discarded. It reports false if in is starved.
func (t *Table) linkRight(in *Inserter, s *splice, link *atomic.Uint64, next uint64, upper []uint64) bool {
	base, undo := t.arena.base, in.pos
	height := randomHeight(&in.rnd)
	block := in.alloc(blockWords(t.slots), blockAlign)
	if block == 0 {
		return false
	}
	tower := in.alloc(towerWords(height), 1)
	if tower == 0 {
		return false
	}
	writeBlock(base, block, t.slots, upper)
	writeTower(base, tower, block, offsetIn(upper[0]), height)
	*raw64(base, tower+1) = next
	word := pack(headIn(upper[0]), tower)
	if !link.CompareAndSwap(next, word) {
		in.retract(undo, tower+towerWords(height))
		return true
	}
	t.raise(height)
	if height > 1 {
		t.linkUpper(s, word, height)
	}
	t.guide.towers.Add(1)
	return true
}

// linkUpper links a tower into the levels above the lowest. Searches are correct without these
// links, only longer.
func (t *Table) linkUpper(s *splice, word uint64, height int) {
	base, tower, head := t.arena.base, offsetIn(word), headIn(word)
	anchor := nodeKey(base, towerAnchor(base, tower))
	t.descendSplice(s, t.first, int(t.height.Load())-1, 0, anchor, head)
	for l := 1; l < height; l++ {
		x := s.towers[l]
		for {
			link := towerLink(base, x, l)
			next := link.Load()
			if passes(base, next, anchor, head, below) {
				x = offsetIn(next)
				continue
			}
			towerLink(base, tower, l).Store(next)
			if link.CompareAndSwap(next, word) {
				break
			}
		}
	}
}

// raise makes searches start at least at height levels.
func (t *Table) raise(height int) {
	for old := t.height.Load(); int(old) < height; old = t.height.Load() {
		if t.height.CompareAndSwap(old, int32(height)) {
			return
		}
	}
}

// retract takes back memory that no other goroutine has seen, if it is the last that was allocated.
func (in *Inserter) retract(pos, end uint32) {
	if in.pos == end {
		in.pos = pos
	}
}

package memtable

// approach finds a tower at or before the one responsible for key, and stores the path to it in the
// splice. It tries, cheapest first: the tower of the previous insert, a short climb from it within
// a sorted batch, the guide, a descent from the top.
func (t *Table) approach(in *Inserter, key []byte, head uint32) uint32 {
	if in.levels > 0 {
		if head > in.lowHead && head < in.highHead {
			return in.splice[0] // the same tower again; no memory has to be read to know that
		}
		if in.ascending {
			if l, ok := t.climb(in, key, head); ok {
				return t.descendSplice(in, in.splice[l], l, in.lowHead, key, head)
			}
		}
	}
	if x, low := t.guide.find(t.arena.base, head); x != 0 {
		in.levels = guideHeight
		return t.descendSplice(in, x, guideHeight-1, low, key, head)
	}
	in.levels = int(t.height.Load())
	return t.descendSplice(in, t.first, in.levels-1, 0, key, head)
}

// climb finds the level from which the splice leads to key, as low as the distance allows; false if
// the splice does not reach far enough.
func (t *Table) climb(in *Inserter, key []byte, head uint32) (level int, ok bool) {
	l := 0
	for l < in.levels && passes(t.arena.base, towerLink(t.arena.base, in.splice[l], l).Load(), key, head, upTo) {
		l++
	}
	if l == in.levels && int(t.height.Load()) > l {
		return 0, false
	}
	return max(l-1, 0), true
}

// descendSplice descends to key from tower x at level l, where low is the head of x's anchor, and
// stores the path in the splice.
func (t *Table) descendSplice(in *Inserter, x uint32, l int, low uint32, key []byte, head uint32) uint32 {
	base := t.arena.base
	high := uint32(0)
	for ; l >= 0; l-- {
		for {
			link := towerLink(base, x, l).Load()
			if h := headIn(link); h > head || h == head && !passesTie(base, link, key, upTo) {
				high = h
				break
			}
			x, low = offsetIn(link), headIn(link)
		}
		in.splice[l] = x
	}
	in.lowHead, in.highHead = low, high
	return x
}

// saveSplice drops a splice that the splits of other writers have made obsolete: the next keys
// would start from it and walk further each time.
func (in *Inserter) saveSplice() {
	if in.moved {
		in.moved, in.levels = false, 0
	}
}

package memtable

// splice is a path to the place of an insert: per level, the last tower passed. Towers are never removed, so it stays a
// valid start for any key that is not smaller.
type splice struct {
	towers    [heightMax]uint32
	levels    int    // levels that are filled; zero without a path
	lowHead   uint32 // head of the anchor of towers[0]
	highHead  uint32 // head of the next anchor when it was read; a nearer tower may have been linked since
	ascending bool   // the next key is not smaller than the one for which the path was made
	moved     bool   // the latest insert ended right of towers[0], so the path is too far left to be kept
	follows   bool   // the next key is expected right of the one for which the path was made, and near it; constant
}

// smallBody is the number of operations of a body whose first may be a record, which has a splice of its own. Records are
// keys that the store itself adds to a commit. They come before the user's keys, and each is near the one before it: with
// one splice for both, each would lose the path of the other.
const smallBody = 2

// spliceOf is the splice for operation i of a body of n.
func (in *Inserter) spliceOf(i, n int) *splice {
	if n == smallBody && i == 0 {
		return &in.record
	}
	return &in.splice
}

// approach finds a tower at or before the one responsible for key, and stores the path to it in the
// splice. It tries, cheapest first: the tower of the previous insert, a short climb from it within
// a sorted batch or to the next record, the guide, a descent from the top.
func (t *Table) approach(s *splice, key []byte, head uint32) uint32 {
	if s.levels > 0 {
		if head > s.lowHead && head < s.highHead {
			return s.towers[0] // the same tower again; no memory has to be read to know that
		}
		if s.ascending || s.follows && t.continues(s, key, head) {
			if l, ok := t.climb(s, key, head); ok {
				return t.descendSplice(s, s.towers[l], l, s.lowHead, key, head)
			}
		}
	}
	if x, low := t.guide.find(t.arena.base, head); x != 0 {
		s.levels = guideHeight
		return t.descendSplice(s, x, guideHeight-1, low, key, head)
	}
	s.levels = int(t.height.Load())
	return t.descendSplice(s, t.first, s.levels-1, 0, key, head)
}

// continues reports whether key is not smaller than the anchor of the tower of the previous insert.
func (t *Table) continues(s *splice, key []byte, head uint32) bool {
	if s.levels == 0 || head < s.lowHead {
		return false
	}
	base := t.arena.base
	return head > s.lowHead || s.towers[0] == t.first || compareNode(base, towerAnchor(base, s.towers[0]), key) <= 0
}

// climb finds the level from which the splice leads to key, as low as the distance allows; false if
// the splice does not reach far enough.
func (t *Table) climb(s *splice, key []byte, head uint32) (level int, ok bool) {
	l := 0
	for l < s.levels && passes(t.arena.base, towerLink(t.arena.base, s.towers[l], l).Load(), key, head, upTo) {
		l++
	}
	if l == s.levels && int(t.height.Load()) > l {
		return 0, false
	}
	return max(l-1, 0), true
}

// descendSplice descends to key from tower x at level l, where low is the head of x's anchor, and
// stores the path in the splice.
func (t *Table) descendSplice(s *splice, x uint32, l int, low uint32, key []byte, head uint32) uint32 {
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
		s.towers[l] = x
	}
	s.lowHead, s.highHead = low, high
	return x
}

// save drops a path that the splits of other writers have made obsolete: the next keys would start from it and walk
// further each time.
func (s *splice) save() {
	if s.moved {
		s.moved, s.levels = false, 0
	}
}

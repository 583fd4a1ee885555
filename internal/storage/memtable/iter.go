package memtable

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
)

// Iter walks a table in the order of its internal keys: user key ascending, and per key the newest
// version first. The methods that position and step report whether they ended on an entry. After a
// step off an end, or a search that finds nothing, the iterator is past that end, as in Pebble:
// further steps in that direction find nothing, and a step back finds the entry at the end.
//
// An iterator takes a sorted copy of one block at a time. It shows everything that was applied
// before it was positioned; what is applied later it may or may not show. Keys never come out of
// order or twice.
//
// Next and Prev visit every version, which only works in an immutable table or one that is not
// pruned. A reader at a snapshot uses NextKey, PrevKey and VersionAt: they read a chain down to the
// version that the snapshot sees and no further.
//
// The zero Iter becomes usable by Init. It holds no resource. It is large, so keep it and use it
// again.
type Iter struct {
	table      *Table
	at         int    // index in words. Invariant: 0 <= at < count while valid
	count      int    // zero while the iterator is invalid
	next       uint32 // the tower right of the copied block
	version    uint32 // the current version, zero if the newest has not been looked up
	off        edge   // where it is while it is invalid
	prefetched int    // the nodes of words below it are prefetched
	words      [slotsMax]uint64
}

// edge is an end of the table.
type edge uint8

const (
	nowhere edge = iota // not positioned
	atStart             // before the first entry
	atEnd               // after the last one
)

// prefetchNodes is how many nodes a step prefetches: the misses then overlap instead of following
// each other.
const prefetchNodes = 8

// Init prepares it for t, without a position.
func (it *Iter) Init(t *Table) { it.table, it.count, it.version, it.off = t, 0, 0, nowhere }

// Valid reports whether the iterator is on an entry.
func (it *Iter) Valid() bool { return it.count > 0 }

// First moves to the first key's newest version.
func (it *Iter) First() bool { return it.seekGE(nil) }

// SeekGE moves to the newest version of the first key that is >= key.
func (it *Iter) SeekGE(key []byte) bool { return it.seekGE(key) }

// SeekNearGE is SeekGE in an immutable table. It is fast if the key is in the block at which the iterator is.
func (it *Iter) SeekNearGE(key []byte) bool {
	if it.count == 0 {
		return it.seekGE(key)
	}
	head := it.table.heads.of(key)
	if it.compare(0, key, head) > 0 || it.compare(it.count-1, key, head) < 0 {
		return it.enter(it.table.descend(key, head, upTo), key, head, true)
	}
	if it.at, it.version = it.lowerBound(key, head), 0; it.at >= it.prefetched {
		it.prefetch()
	}
	return true
}

// Last moves to the last key's oldest version.
func (it *Iter) Last() bool { return it.LastKey() && it.toOldest() }

// SeekLT moves to the oldest version of the last key that is < key.
func (it *Iter) SeekLT(key []byte) bool { return it.SeekKeyLT(key) && it.toOldest() }

// Next moves to the next older version of the key, or to the newest of the next key.
func (it *Iter) Next() bool {
	if it.count == 0 {
		return it.off == atStart && it.First()
	}
	if older := versionOlder(it.table.arena.base, it.current()).Load(); older != 0 {
		it.version = older
		return true
	}
	return it.NextKey()
}

// Prev moves to the next newer version of the key, or to the oldest of the key before. A chain is
// linked from new to old, so a step costs a walk of the chain.
func (it *Iter) Prev() bool {
	if it.count == 0 {
		return it.off == atEnd && it.Last()
	}
	base, here := it.table.arena.base, it.current()
	newer := uint32(0)
	for v := offsetIn(word64(base, it.node()).Load()); v != here && v != 0; v = versionOlder(base, v).Load() {
		newer = v
	}
	if newer != 0 {
		it.version = newer
		return true
	}
	return it.PrevKey() && it.toOldest()
}

// NextKey moves to the newest version of the next key.
func (it *Iter) NextKey() bool {
	if it.count == 0 {
		return it.off == atStart && it.First()
	}
	it.version = 0
	if it.at++; it.at < it.count {
		if it.at >= it.prefetched {
			it.prefetch()
		}
		return true
	}
	last := it.words[it.count-1]
	if it.next == 0 {
		return it.leave(atEnd)
	}
	return it.enter(it.next, nodeKey(it.table.arena.base, offsetIn(last)), headIn(last), false)
}

// NextBlock moves to the newest version of the first key of the next block, and returns the number of
// keys that it passed.
func (it *Iter) NextBlock() (passed int, ok bool) {
	passed = it.count - it.at
	it.at = it.count - 1
	return passed, it.NextKey()
}

// PrevKey moves to the newest version of the key before.
func (it *Iter) PrevKey() bool {
	if it.count == 0 {
		return it.off == atEnd && it.LastKey()
	}
	it.version = 0
	if it.at > 0 {
		it.at--
		return true
	}
	w := it.words[0]
	return it.seekLT(nodeKey(it.table.arena.base, offsetIn(w)), headIn(w))
}

// LastKey moves to the newest version of the last key.
func (it *Iter) LastKey() bool {
	t := it.table
	x := t.last()
	for {
		it.copyBlock(x)
		if it.next == 0 {
			break
		}
		x = it.next
	}
	if it.count == 0 { // only the first tower's block can be
		return it.leave(atStart)
	}
	it.at = it.count - 1
	return true
}

// SeekKeyLT moves to the newest version of the last key that is < key.
func (it *Iter) SeekKeyLT(key []byte) bool { return it.seekLT(key, it.table.heads.of(key)) }

// Key is the current user key. It aliases the table.
func (it *Iter) Key() []byte { return nodeKey(it.table.arena.base, it.node()) }

// Trailer is the epoch and kind of the current version.
func (it *Iter) Trailer() keys.Trailer { return versionTrailer(it.table.arena.base, it.current()) }

// Value is the value of the current version, empty for a tombstone. It aliases the table.
func (it *Iter) Value() []byte { return refAt(it.table.arena.base, it.current()).Value() }

// Version is the current version.
func (it *Iter) Version() Version { return refAt(it.table.arena.base, it.current()).Version() }

// VersionAt is the newest version of the key that is <= at. It does not move the iterator.
func (it *Iter) VersionAt(at keys.Epoch) Ref {
	v := newestAt(it.table.arena.base, it.node(), at)
	if v == 0 {
		return Ref{}
	}
	return refAt(it.table.arena.base, v)
}

// Chain names the chain of the current key, for Prune.
func (it *Iter) Chain() Chain { return Chain{it.node()} }

func (it *Iter) node() uint32 { return offsetIn(it.words[it.at]) }

// current is the current version. After a step over keys it is the newest, which is looked up here.
func (it *Iter) current() uint32 {
	if it.version == 0 {
		it.version = offsetIn(word64(it.table.arena.base, it.node()).Load())
	}
	return it.version
}

func (it *Iter) toOldest() bool {
	base := it.table.arena.base
	v := it.current()
	for older := versionOlder(base, v).Load(); older != 0; older = versionOlder(base, v).Load() {
		v = older
	}
	it.version = v
	return true
}

func (it *Iter) seekGE(key []byte) bool {
	t := it.table
	head := uint32(0)
	if key != nil {
		head = t.heads.of(key)
	}
	return it.enter(t.descend(key, head, upTo), key, head, true)
}

// enter moves to the first key > key, or >= key with orEqual, in tower x or right of it.
func (it *Iter) enter(x uint32, key []byte, head uint32, orEqual bool) bool {
	for ; x != 0; x = it.next {
		it.copyBlock(x)
		if it.at = it.lowerBound(key, head); it.at < it.count && !orEqual && it.compare(it.at, key, head) == 0 {
			it.at++
		}
		if it.at < it.count {
			it.prefetch()
			return true
		}
	}
	return it.leave(atEnd)
}

// leave makes the iterator invalid.
func (it *Iter) leave(off edge) bool {
	it.count, it.off = 0, off
	return false
}

func (it *Iter) seekLT(key []byte, head uint32) bool {
	t := it.table
	x := t.descend(key, head, below)
	for {
		it.copyBlock(x)
		it.at = it.lowerBound(key, head) - 1
		// The block may have been the left half of a split that the descent was too early to see.
		if it.next == 0 || compareNode(t.arena.base, towerAnchor(t.arena.base, it.next), key) >= 0 {
			break
		}
		x = it.next
	}
	if it.at < 0 { // the first tower, because all others contain their anchor
		return it.leave(atStart)
	}
	return it.count > 0
}

// copyBlock takes a sorted copy of x's block, without the keys that belong to the tower right of
// it, whose offset goes to next. The block is loaded before the link, for the reason given at
// advanceRight.
func (it *Iter) copyBlock(x uint32) {
	t := it.table
	base := t.arena.base
	block := towerBlock(base, x).Load()
	n, sorted := loadBlock(base, block, t.slots, &it.words)
	link := towerLink(base, x, 0).Load()
	sortWords(base, it.words[:n], sorted)
	if it.next = offsetIn(link); it.next != 0 {
		anchor := pack(headIn(link), towerAnchor(base, it.next))
		for n > 0 && compareWords(base, it.words[n-1], anchor) >= 0 {
			n--
		}
	}
	it.count, it.version, it.prefetched = n, 0, 0
}

// lowerBound is the index of the first word whose key is >= key.
func (it *Iter) lowerBound(key []byte, head uint32) int {
	lo, hi := 0, it.count
	for lo < hi {
		if mid := int(uint(lo+hi) / 2); it.compare(mid, key, head) < 0 {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

func (it *Iter) compare(i int, key []byte, head uint32) int {
	w := it.words[i]
	if h := headIn(w); h != head {
		if h < head {
			return -1
		}
		return 1
	}
	return bytes.Compare(nodeKey(it.table.arena.base, offsetIn(w)), key)
}

// prefetch reads the nodes that come next.
func (it *Iter) prefetch() {
	it.prefetched = min(it.at+prefetchNodes, it.count)
	sum := uint64(0)
	for _, w := range it.words[it.at:it.prefetched] {
		sum += word64(it.table.arena.base, offsetIn(w)).Load()
	}
	_ = sum
}

package memtable

import (
	"bytes"
	"encoding/binary"

	"github.com/epochkv/epochkv/internal/keys"
)

// Heads computes the heads of keys: 32 bits that order as the keys do. Unequal heads always order as
// their keys; only equal heads need the keys themselves, which costs a cache miss for each.
//
// Keys of applications begin alike, and consist of few different bytes: four bytes of
// `table/00000000042/column` say nothing. So heads are computed in groups of keys that share a
// prefix. Each group has a share of the 32 bits, and divides it by the values that the bytes after
// the prefix take: digits by ten, and a byte that is the same in all keys by one.
//
//	0                                                          2^32
//	├──────────────────┬──────────────┬──────────────────────────┤
//	│ "accounts/0..."  │ "history/2.."│ "table/0000..."          │
//	└──────────────────┴──────────────┴──────────────────────────┘
//
// A key outside all groups gets the last head of the group before it, and a byte outside the values
// of its place the first or last head of that place. So every key has a valid head, whatever the
// groups were learned from; more keys then share one.
//
// Keys that are expected have heads of their own, whatever the groups were learned from; see Expected.
//
// Heads is immutable.
type Heads struct {
	groupedHeads // of all keys, or of those after the expected ones

	expected *expectedHeads // nil without expected keys
}

// of is the head of key.
func (h *Heads) of(key []byte) uint32 {
	if e := h.expected; e != nil {
		switch mark := first32(key); {
		case mark < e.mark || mark == e.mark && len(key) < expectedPrefix:
			return e.before.of(key)
		case mark == e.mark:
			return e.group.head(key[expectedPrefix:])
		}
	}
	return h.groupedHeads.of(key)
}

// groupedHeads are the heads of a range of keys.
type groupedHeads struct {
	prefix []byte // of all groups
	groups []headGroup
	words  [groupsMax]uint64 // of each group: the eight bytes of its prefix after that of all
}

// headGroup is the keys with one prefix.
type headGroup struct {
	prefix      []byte // after the prefix of all groups
	first, size uint64 // its heads are those in [first, first+size)
	places      []headPlace
}

// headPlace is a byte after the prefix of a group. Values are spread over spread heads each: the
// first one, least, over the first of them.
type headPlace struct {
	least, span, shift uint8
	spread             uint64
}

const (
	// groupsMax bounds the groups: their words are two cache lines, and a search reads them all.
	groupsMax = 16
	// placesMax bounds the bytes that a head depends on.
	placesMax = 24
	// allHeads is the number of heads.
	allHeads = 1 << 32
)

// plainHeads has one group: the heads are the four bytes after the prefix.
func plainHeads(prefix []byte, e *Expected) *Heads {
	return newHeads(e, func(after bool, first, size uint64) groupedHeads {
		if !after {
			return plainGroup(e.Prefix[:1], first, size)
		}
		return plainGroup(prefix, first, size)
	})
}

func plainGroup(prefix []byte, first, size uint64) groupedHeads {
	return groupedHeads{prefix: bytes.Clone(prefix), groups: []headGroup{{first: first, size: size}}}
}

func (h *groupedHeads) of(key []byte) uint32 {
	n := len(h.prefix)
	if len(key) < n || string(key[:n]) != string(h.prefix) {
		if bytes.Compare(key, h.prefix) < 0 {
			return uint32(h.groups[0].first)
		}
		last := &h.groups[len(h.groups)-1]
		return uint32(last.first + last.size - 1)
	}
	rest, i := key[n:], 0
	if len(h.groups) > 1 {
		i = h.groupOf(rest)
	}
	g := &h.groups[i]
	n = len(g.prefix)
	if len(rest) < n || string(rest[:n]) != string(g.prefix) {
		if bytes.Compare(rest, g.prefix) < 0 { // the first group
			return uint32(g.first)
		}
		return uint32(g.first + g.size - 1)
	}
	return g.head(rest[n:])
}

// groupOf is the last group whose prefix is not after rest, or the first group.
func (h *groupedHeads) groupOf(rest []byte) int {
	word, i := keys.WordAfter(rest, 0), -1
	for _, w := range h.words[:len(h.groups)] {
		if w <= word {
			i++
		}
	}
	for i > 0 && h.words[i] == word && bytes.Compare(h.groups[i].prefix, rest) > 0 {
		i--
	}
	return max(i, 0)
}

// head is the head of a key that has rest after the prefix of the group.
func (g *headGroup) head(rest []byte) uint32 {
	if g.places == nil {
		return uint32(g.first + uint64(first32(rest))*g.size>>32)
	}
	head := g.first
	for i := range g.places {
		if i == len(rest) {
			break
		}
		p := &g.places[i]
		value := uint64(rest[i]) - uint64(p.least)
		if value > uint64(p.span) {
			if rest[i] > p.least {
				head += uint64(p.span>>p.shift)*p.spread + p.spread - 1
			}
			break
		}
		head += value >> p.shift * p.spread
	}
	return uint32(head)
}

// first32 is the first four bytes of rest as a number; missing bytes are zeros.
func first32(rest []byte) uint32 {
	if len(rest) >= 4 {
		return binary.BigEndian.Uint32(rest)
	}
	var padded [4]byte
	copy(padded[:], rest)
	return binary.BigEndian.Uint32(padded[:])
}

// pack puts a head and an offset into one word, as slots and links hold them.
func pack(head, off uint32) uint64 { return uint64(head)<<32 | uint64(off) }

func headIn(word uint64) uint32   { return uint32(word >> 32) }
func offsetIn(word uint64) uint32 { return uint32(word) }

package page

import (
	"bytes"
	"encoding/binary"

	"github.com/epochkv/epochkv/internal/keys"
)

// An inner node of n children, with n-1 separators that share a prefix of p bytes:
//
//	64       align 4     + 4(n-1)  align 8    + 8n            + 8n
//	+--------+-----------+---------+----------+---------------+-------------+---
//	| prefix | heads     | offsets | children | newest epochs | separator 1 | ...
//	| p      | 4(n-1)    | 2n      | 8n       | and stale     |
//	|        |           |         |          | shares, 8n    |
//	+--------+-----------+---------+----------+---------------+-------------+---
//
// Offsets are of the n-1 separators, and of the end behind the last. The newest epoch of each child stands here too, so that
// validating a range need not read the pages that nothing recent touched. An epoch takes seven bytes; the eighth is the child's stale
// share, so that a sweep need not read the pages that hold nothing to sweep.
//
//	separator
//	+-----------------+--------+---------+
//	| trailer len (1) | suffix | trailer |    trailer len is 0 or 8
//	+-----------------+--------+---------+
//
// A separator without a trailer lies before all versions of its key.

// NoTrailer is the trailer of a separator that has none: it sorts before all versions.
const NoTrailer = ^keys.Trailer(0)

const trailerSize = 8

// Separator is the lower bound of a subtree: everything in it is at or behind (Key, Trailer).
type Separator struct {
	Key     []byte
	Trailer keys.Trailer
}

// Compare orders a separator against an internal key, or another separator.
func (s Separator) Compare(key []byte, t keys.Trailer) int {
	return keys.Compare(s.Key, s.Trailer, key, t)
}

// Child is what a parent knows of a subtree.
type Child struct {
	Separator
	ID           ID
	Newest       keys.Epoch
	DeadVersions DeadRatio
}

// Inner reads a verified inner page.
type Inner []byte

// Count is the number of children.
func (p Inner) Count() int { return int(binary.LittleEndian.Uint16(p[offCount:])) }

// Level is the distance from the leaves: 1 for their parents.
func (p Inner) Level() int { return int(p[offLevel]) }

// innerLayout is where the parts of an inner node begin.
type innerLayout struct{ heads, offsets, children, newest, separators int }

func layoutInner(n, pl int) (l innerLayout) {
	l.heads = (treeHeaderSize + pl + 3) &^ 3
	l.offsets = l.heads + 4*(n-1)
	l.children = (l.offsets + 2*n + 7) &^ 7
	l.newest = l.children + 8*n
	l.separators = l.newest + 8*n
	return l
}

func (p Inner) prefixLen() int { return int(binary.LittleEndian.Uint16(p[offPrefix:])) }

func (p Inner) prefix() []byte { return p[treeHeaderSize : treeHeaderSize+p.prefixLen()] }

// Child is the id of child i.
func (p Inner) Child(i int) ID {
	n := p.Count()
	at := (treeHeaderSize + p.prefixLen() + 3) &^ 3
	at = (at+4*(n-1)+2*n+7)&^7 + 8*i
	return ID(binary.LittleEndian.Uint64(p[at:]))
}

// Newest bounds the epochs below child i.
func (p Inner) Newest(i int) keys.Epoch {
	return keys.Epoch(p.newestAndDead(i)) & keys.MaxEpoch
}

// DeadVersions is the stale share of child i.
func (p Inner) DeadVersions(i int) DeadRatio { return DeadRatio(p.newestAndDead(i) >> deadShift) }

func (p Inner) newestAndDead(i int) uint64 {
	l := layoutInner(p.Count(), p.prefixLen())
	return binary.LittleEndian.Uint64(p[l.newest+8*i:])
}

// separator returns the suffix and trailer of separator i, which is at least 1.
func (p Inner) separator(offsets []byte, i int) (suffix []byte, t keys.Trailer) {
	w := binary.LittleEndian.Uint32(offsets[2*(i-1):])
	s := p[w&0xffff : w>>16]
	end := len(s) - int(s[0])
	if s[0] == 0 {
		return s[1:], NoTrailer
	}
	return s[1:end], keys.Trailer(binary.LittleEndian.Uint64(s[end:]))
}

// Separator appends the key of separator i to dst. Separator 0 is the node's own lower bound, which its parent knows: for it, i must
// not be zero.
func (p Inner) Separator(dst []byte, i int) Separator {
	l := layoutInner(p.Count(), p.prefixLen())
	suffix, t := p.separator(p[l.offsets:], i)
	dst = append(dst, p.prefix()...)
	return Separator{Key: append(dst, suffix...), Trailer: t}
}

// Search returns the child that holds (key, t), or would hold it: the last whose separator is not behind it.
//
// For the newest version of key not newer than e, search for (key, trailer of e with the largest kind): separators between versions of
// one key stand directly behind a version, so that what is sought never lies in the next child. For the first entry of key,
// search for (key, NoTrailer).
func (p Inner) Search(key []byte, t keys.Trailer) int {
	n, pl := p.Count()-1, p.prefixLen()
	if pl != 0 {
		if c := comparePrefix(key, p.prefix()); c < 0 {
			return 0
		} else if c > 0 {
			return n
		}
	}
	suffix := key[pl:]
	heads := (treeHeaderSize + pl + 3) &^ 3
	lo, hi := headsRun(p[heads:], n, head(suffix))
	if lo == hi {
		return lo
	}
	offsets := p[heads+4*n:]
	for lo < hi { // lo separators are known to be at or before the target
		m := int(uint(lo+hi) >> 1)
		s, st := p.separator(offsets, m+1)
		if c := bytes.Compare(s, suffix); c < 0 || c == 0 && st >= t {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo
}

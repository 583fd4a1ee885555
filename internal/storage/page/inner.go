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
//	| p      | 4(n-1)    | 2n      | 8n       | and dead-     |
//	|        |           |         |          | version       |
//	|        |           |         |          | ratios, 8n    |
//	+--------+-----------+---------+----------+---------------+-------------+---
//
// Offsets are of the n-1 separators, and of the end of the last. The newest epoch of each child is stored
// here too, so that the validation of a range need not read pages without recent changes. An epoch takes
// seven bytes. The eighth is the child's dead-version ratio, so that vacuum need not read pages without dead
// versions.
//
//	separator
//	+-----------------+--------+---------+
//	| trailer len (1) | suffix | trailer |    trailer len is 0 or 8
//	+-----------------+--------+---------+
//
// A separator without a trailer sorts before all versions of its key.

// NoTrailer is the trailer of a separator that has none: it sorts before all versions.
const NoTrailer = ^keys.Trailer(0)

const trailerSize = 8

// Separator is the lower bound of a subtree: all keys in it are equal to or greater than (Key, Trailer).
type Separator struct {
	Key     []byte
	Trailer keys.Trailer
}

// Compare orders a separator against an internal key, or another separator.
func (s Separator) Compare(key []byte, t keys.Trailer) int {
	return keys.Compare(s.Key, s.Trailer, key, t)
}

// Child is what a parent stores about a subtree.
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

// DeadVersions is the dead-version ratio of child i.
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

// Separator appends the key of separator i to dst. i must not be zero: separator 0 is the node's own lower
// bound, which its parent stores.
func (p Inner) Separator(dst []byte, i int) Separator {
	l := layoutInner(p.Count(), p.prefixLen())
	suffix, t := p.separator(p[l.offsets:], i)
	dst = append(dst, p.prefix()...)
	return Separator{Key: append(dst, suffix...), Trailer: t}
}

// Search returns the child that holds (key, t), or would hold it: the last one whose separator is not
// greater.
//
// To find the newest version of key that is not newer than e, search for (key, trailer of e with the
// largest kind): a separator between versions of one key directly follows a version, so that the result is
// never in the next child. To find the first entry of key, search for (key, NoTrailer).
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
	for lo < hi { // lo separators are not greater than the target
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

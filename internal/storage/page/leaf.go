package page

import (
	"bytes"
	"encoding/binary"
	"math/bits"

	"github.com/epochkv/epochkv/internal/keys"
)

// Tree pages continue the common header.
//
//	32      34           36      37         64
//	+-------+------------+-------+----------+---
//	| count | prefix len | level | reserved | ...
//	+-------+------------+-------+----------+---
//
// Count is of entries in a leaf and of children in an inner node. A leaf has level 0, its parent 1.
const (
	offCount  = 32
	offPrefix = 34
	offLevel  = 36
	offTree   = 37 // reserved from here

	treeHeaderSize = 64
)

// LevelMax bounds the height of a tree: with two children in each node it would already have more pages
// than a file can hold.
const LevelMax = 31

// A leaf of n entries with a prefix of p bytes:
//
//	64             64+n     align 2   + 2(n+1)  + 4n
//	+--------------+--------+---------+---------+---------+---------+---
//	| fingerprints | prefix | offsets | heads   | entry 0 | entry 1 | ...
//	| n            | p      | 2(n+1)  | 4n      |
//	+--------------+--------+---------+---------+---------+---------+---
//
// A point read goes from fingerprints to offsets to one entry. With 60 entries, fingerprints and offsets
// are in the first four cache lines. Heads are only for seeks.
//
// Offsets are of the entries from the start of the page, and of the end of the last one, so that no entry
// stores its length. Entries are in key order without gaps: a scan reads memory forward.
//
//	entry
//	0         8              10       10+s
//	+---------+--------------+--------+-------+
//	| trailer | suffix len s | suffix | value |
//	|         | and flags    |        |       |
//	+---------+--------------+--------+-------+
//
// The value begins with metadata if the trailer's kind says so; a Ref that replaces a long value is after them.
// An entry other than the first whose suffix is empty is a further version of the previous key.
const (
	entryHeader   = 10
	suffixLenLow  = 1<<14 - 1
	flagLarge     = 1 << 14 // the value is a Ref
	suffixLenHigh = 1 << 15 // bit 14 of the length in pages of 64 KiB; reserved in smaller pages, whose keys are shorter
)

// suffixLen extracts the length from an entry's word of length and flags.
func suffixLen(word uint16) int { return int(word&suffixLenLow | word>>1&(1<<14)) }

// RefSize is the length of a Ref.
const RefSize = 24

// Ref is stored in a leaf in place of a value that is stored elsewhere. The store of that value defines its
// bytes.
type Ref [RefSize]byte

// RefOf is the reference at the end of what a leaf stores of a Large entry; before it may be metadata.
func RefOf(stored []byte) Ref { return Ref(stored[len(stored)-RefSize:]) }

// Leaf reads a verified leaf page.
type Leaf []byte

// Entry is one version in a leaf. Same means a further version of the previous key; Large means that a Ref
// is in place of the value. Value includes the version's metadata, if the kind says that it has any.
type Entry struct {
	Key     []byte
	Value   []byte
	Trailer keys.Trailer
	Same    bool
	Large   bool
}

// Count is the number of entries.
func (p Leaf) Count() int { return int(binary.LittleEndian.Uint16(p[offCount:])) }

func (p Leaf) prefixLen() int { return int(binary.LittleEndian.Uint16(p[offPrefix:])) }

// offsetsAt is where the offsets of a leaf of n entries with a prefix of length pl begin; its heads follow 2(n+1) later.
func offsetsAt(n, pl int) int { return (treeHeaderSize + n + pl + 1) &^ 1 }

// LeafLayout is a leaf and the offsets of its parts, for reading many entries.
type LeafLayout struct {
	page    []byte
	offsets []byte
	prefix  []byte
	count   int
}

// Layout computes the layout of p.
func (p Leaf) Layout() LeafLayout {
	n, pl := p.Count(), p.prefixLen()
	at := offsetsAt(n, pl)
	return LeafLayout{
		page:    p,
		offsets: p[at : at+2*(n+1)],
		prefix:  p[treeHeaderSize+n : treeHeaderSize+n+pl],
		count:   n,
	}
}

// Count is the number of entries.
func (v *LeafLayout) Count() int { return v.count }

// Prefix is what all keys of the leaf share.
func (v *LeafLayout) Prefix() []byte { return v.prefix }

// leafTables are the tables of a leaf beside its offsets.
type leafTables struct{ fingerprints, heads []byte }

func (v *LeafLayout) tables() leafTables {
	at := offsetsAt(v.count, len(v.prefix)) + 2*(v.count+1)
	return leafTables{v.page[treeHeaderSize : treeHeaderSize+v.count], v.page[at : at+4*v.count]}
}

// start is where entry i begins; that of the count is the end of the last one.
func (v *LeafLayout) start(i int) int { return int(binary.LittleEndian.Uint16(v.offsets[2*i:])) }

// suffixAt is the suffix of entry i as it is stored: empty for a further version.
func (v *LeafLayout) suffixAt(i int) []byte {
	s, _, _, _ := v.At(i)
	return s
}

// SoleVersions counts the entries of [i, to) up to the first that is a tombstone, or not the only version of its key in the
// leaf.
func (v *LeafLayout) SoleVersions(i, to int) (n int) {
	for ; i+n < to; n++ {
		e := v.page[v.start(i+n):]
		if i+n > 0 && suffixLen(binary.LittleEndian.Uint16(e[8:])) == 0 {
			return max(n-1, 0)
		}
		if keys.Kind(e[0]) == keys.KindDelete {
			return n
		}
	}
	if n > 0 && to < v.count && v.Same(to) {
		n--
	}
	return n
}

// At returns suffix, trailer and value of entry i. The suffix of a further version of the previous key is
// empty.
func (v *LeafLayout) At(i int) (suffix []byte, t keys.Trailer, value []byte, large bool) {
	w := binary.LittleEndian.Uint32(v.offsets[2*i:])
	e := v.page[w&0xffff : w>>16]
	s := binary.LittleEndian.Uint16(e[8:])
	n := entryHeader + suffixLen(s)
	return e[entryHeader:n], keys.Trailer(binary.LittleEndian.Uint64(e)), e[n:], s&flagLarge != 0
}

// Key appends the key of entry i, which is not a further version, to dst.
func (v *LeafLayout) Key(dst []byte, i int) []byte {
	return append(append(dst, v.prefix...), v.suffixAt(i)...)
}

// Trailer is the trailer of entry i.
func (v *LeafLayout) Trailer(i int) keys.Trailer {
	return keys.Trailer(binary.LittleEndian.Uint64(v.page[binary.LittleEndian.Uint16(v.offsets[2*i:]):]))
}

// Same reports whether entry i is a further version of the key of entry i-1.
func (v *LeafLayout) Same(i int) bool {
	at := binary.LittleEndian.Uint16(v.offsets[2*i:])
	return i > 0 && suffixLen(binary.LittleEndian.Uint16(v.page[int(at)+8:])) == 0
}

// Suffix is the key of entry i without the prefix, also if i is a further version.
func (v *LeafLayout) Suffix(i int) []byte {
	for v.Same(i) {
		i--
	}
	s, _, _, _ := v.At(i)
	return s
}

// Search returns the first entry whose key is not less than key.
func (p Leaf) Search(key []byte) int {
	n, pl := p.Count(), p.prefixLen()
	if c := comparePrefix(key, p[treeHeaderSize+n:treeHeaderSize+n+pl]); c < 0 {
		return 0
	} else if c > 0 {
		return n
	}
	suffix := key[pl:]
	lo, hi := headsRun(p[offsetsAt(n, pl)+2*(n+1):], n, head(suffix))
	if lo == hi {
		return lo
	}
	v := p.Layout()
	for lo < hi {
		m := int(uint(lo+hi) >> 1)
		if bytes.Compare(v.Suffix(m), suffix) < 0 {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo
}

// comparePrefix is zero if key starts with prefix. Otherwise it is negative if key sorts before all keys
// with the prefix, and positive if after.
func comparePrefix(key, prefix []byte) int {
	if len(prefix) == 0 {
		return 0
	}
	if len(key) >= len(prefix) {
		return bytes.Compare(key[:len(prefix)], prefix)
	}
	if bytes.Compare(key, prefix) > 0 {
		return 1
	}
	return -1 // less, or a proper prefix of the prefix
}

// Find returns the newest version of key that is not newer than at, given the key's fingerprint. It skips
// entries of the key that are newer than at.
func (p Leaf) Find(key []byte, fingerprint byte, at keys.Epoch) (t keys.Trailer, value []byte, large, ok bool) {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	n, pl := p.Count(), p.prefixLen()
	offsets := p[offsetsAt(n, pl):]
	// Reading the end now lets this cache miss overlap with the one on the fingerprints.
	body := p[:binary.LittleEndian.Uint16(offsets[2*n:])]
	pattern := uint64(fingerprint) * ones
	for base := 0; base < n; base += 8 {
		x := binary.LittleEndian.Uint64(p[treeHeaderSize+base:]) ^ pattern
		for m := (x - ones) & ^x & highs; m != 0; m &= m - 1 {
			i := base + bits.TrailingZeros64(m)>>3
			if i >= n {
				break
			}
			e := body[binary.LittleEndian.Uint16(offsets[2*i:]):]
			s := suffixLen(binary.LittleEndian.Uint16(e[8:]))
			if len(key) != pl+s || s == 0 && i != 0 || string(e[entryHeader:entryHeader+s]) != string(key[pl:]) {
				continue
			}
			if v := p.Layout(); string(v.prefix) == string(key[:pl]) {
				return v.find(i, at)
			}
		}
	}
	return 0, nil, false, false
}

// Prefetch reads the cache lines that Find begins with: the header, the fingerprints, and offsets after
// them. The result means nothing.
func (p Leaf) Prefetch() byte {
	const line = 64
	return p[0] + p[line] + p[2*line] + p[3*line]
}

// find steps from entry i over further versions of its key to the first that is not newer than at.
func (v *LeafLayout) find(i int, at keys.Epoch) (t keys.Trailer, value []byte, large, ok bool) {
	_, t, value, large = v.At(i)
	for t.Epoch() > at {
		if i++; i == v.count || !v.Same(i) {
			return 0, nil, false, false
		}
		_, t, value, large = v.At(i)
	}
	return t, value, large, true
}

// IsTree reports whether p is a tree page of this level.
func IsTree(p []byte, level int) bool {
	want := TypeInner
	if level == 0 {
		want = TypeLeaf
	}
	return Type(p[offType]) == want && int(p[offLevel]) == level
}

// Used is how many bytes of the leaf are in use.
func (p Leaf) Used() int {
	n := p.Count()
	return int(binary.LittleEndian.Uint16(p[offsetsAt(n, p.prefixLen())+2*n:]))
}

// Prefetch starts loading what Find reads first of a leaf: header, fingerprints, and, with up to about a
// hundred entries, offsets. Three consecutive misses become one.
func Prefetch(p []byte) { prefetch(&p[0]) }

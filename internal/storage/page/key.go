package page

import (
	"encoding/binary"
	"math/bits"
)

// KeySizeMax is the longest internal key that a tree of this page size takes: a quarter page for the
// client's key and one byte for its keyspace.
//
// Only these functions say how long a key may be: UserKeyMax is the limit for clients, and the tree refuses
// keys longer than KeySizeMax.
func KeySizeMax(pageSize int) int { return pageSize/4 + 1 }

// UserKeyMax is the longest client's key: KeySizeMax without the byte of the keyspace.
func UserKeyMax(pageSize int) int { return KeySizeMax(pageSize) - 1 }

// InlineMax is the longest value that is stored in a leaf. A longer one is stored as a blob, and the leaf
// holds a Ref.
func InlineMax(pageSize int) int { return pageSize / 4 }

// Fingerprint is one byte of a hash of key, stored in leaves. It is part of the format: the hash takes
// words of eight bytes. The last word is taken from the end of the key (overlapping) or, in shorter keys,
// zero padded.
func Fingerprint(key []byte) byte {
	const m = 0x9E3779B97F4A7C15
	h := uint64(len(key)) * m
	rest := key
	for len(rest) > 8 {
		h = bits.RotateLeft64((h^binary.LittleEndian.Uint64(rest))*m, 32)
		rest = rest[8:]
	}
	h = (h ^ lastWord(key, rest)) * m
	h = (h ^ h>>32) * m
	return byte(h >> 56)
}

// lastWord is the last eight bytes of key. If key is shorter, it is all of rest.
func lastWord(key, rest []byte) uint64 {
	if len(key) >= 8 {
		return binary.LittleEndian.Uint64(key[len(key)-8:])
	}
	var w uint64
	for i, b := range rest {
		w |= uint64(b) << (8 * i)
	}
	return w
}

// head is the first four bytes of suffix as a number that compares as the bytes do. Equal heads decide
// nothing: "a" and "a\x00" have the same head.
func head(suffix []byte) uint32 {
	if len(suffix) >= 4 {
		return binary.BigEndian.Uint32(suffix)
	}
	var h uint32
	for i, b := range suffix {
		h |= uint32(b) << (24 - 8*i)
	}
	return h
}

// headsBelow counts the heads less than h among the first n of heads, which ascend.
//
// The step is arithmetic instead of a branch: a binary search over random keys mispredicts every other branch.
func headsBelow(heads []byte, n int, h uint32) int {
	if n == 0 {
		return 0
	}
	base := 0
	for n > 1 {
		half := n >> 1
		v := binary.LittleEndian.Uint32(heads[4*(base+half-1):])
		base += half & -int((uint64(v)-uint64(h))>>63)
		n -= half
	}
	v := binary.LittleEndian.Uint32(heads[4*base:])
	return base + int((uint64(v)-uint64(h))>>63)
}

// headsRun is the run of heads equal to h: [lo, hi). If lo == hi, h would be inserted at lo.
func headsRun(heads []byte, n int, h uint32) (lo, hi int) {
	lo = headsBelow(heads, n, h)
	if lo == n || binary.LittleEndian.Uint32(heads[4*lo:]) != h {
		return lo, lo
	}
	if lo+1 == n || binary.LittleEndian.Uint32(heads[4*(lo+1):]) != h {
		return lo, lo + 1
	}
	if h == 1<<32-1 {
		return lo, n
	}
	return lo, headsBelow(heads, n, h+1)
}

// sharedPrefix is the length of the common prefix of a and b.
func sharedPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

package page

import (
	"encoding/binary"
	"math/bits"
)

// KeySizeMax is the longest internal key that a tree of this page size takes: a quarter page for the client's key and one
// byte for its keyspace.
//
// This is the one place that says how long a key may be: the limit that clients are held to is UserKeyMax, and what the tree refuses is
// longer than KeySizeMax.
func KeySizeMax(pageSize int) int { return pageSize/4 + 1 }

// UserKeyMax is the longest client's key: KeySizeMax without the byte of the keyspace.
func UserKeyMax(pageSize int) int { return KeySizeMax(pageSize) - 1 }

// InlineMax is the longest value that stays in a leaf. Longer ones are placed elsewhere and leave a Ref.
func InlineMax(pageSize int) int { return pageSize / 4 }

// Fingerprint is one byte of a hash of key, stored in leaves. It is part of the format: words of eight bytes, the last one taken
// from the key's end (overlapping) or, in shorter keys, zero padded.
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

// lastWord is the last eight bytes of key, or the whole of a shorter one, whose rest it then is.
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

// head is the first four bytes of suffix as a number that compares as the bytes do. Equal heads decide nothing: "a" and
// "a\x00" share theirs.
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

// headsRun is the run of heads equal to h: [lo, hi). Where lo == hi, h would stand at lo.
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

// sharedPrefix is the length of what a and b have in common at their start.
func sharedPrefix(a, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

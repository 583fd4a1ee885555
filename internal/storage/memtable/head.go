package memtable

import (
	"bytes"
	"encoding/binary"
	"math"
)

// headOf is the 32-bit head of key in a table whose keys are expected to share prefix: the four
// bytes after the prefix, zero padded. Keys without the prefix clamp to the ends, so that unequal
// heads always order as their keys do and only equal heads need the keys themselves.
func headOf(prefix, key []byte) uint32 {
	n := len(prefix)
	if len(key) < n || string(key[:n]) != string(prefix) {
		if bytes.Compare(key, prefix) < 0 {
			return 0
		}
		return math.MaxUint32
	}
	rest := key[n:]
	if len(rest) >= 4 {
		return binary.BigEndian.Uint32(rest)
	}
	var pad [4]byte
	copy(pad[:], rest)
	return binary.BigEndian.Uint32(pad[:])
}

// pack puts a head and an offset into one word, as slots and links hold them.
func pack(head, off uint32) uint64 { return uint64(head)<<32 | uint64(off) }

func headIn(word uint64) uint32   { return uint32(word >> 32) }
func offsetIn(word uint64) uint32 { return uint32(word) }

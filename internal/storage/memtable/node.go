package memtable

import (
	"bytes"
	"sync/atomic"
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
)

// A node represents one user key.
//
//	0             8               16        20
//	+-------------+---------------+---------+-----+
//	| chain       | prune bound   | key len | key |
//	+-------------+---------------+---------+-----+
//
// chain packs the chain's length (high half) and the offset of its newest version, so that one CAS
// installs a version and counts it. Only Prune uses the prune bound. The first version is allocated
// directly after the node: a read of a key that was written once finds both in neighbouring cache
// lines.
const (
	nodeBoundWord = 1
	nodeLenOffset = 16
	nodeKeyOffset = 20
)

// A version is what one commit did to one key.
//
//	0          8       12              16
//	+----------+-------+---------------+-------+------------+
//	| trailer  | older | value len|flg | value | skip link? |
//	+----------+-------+---------------+-------+------------+
//
// The trailer is keys.Trailer. older is the offset of the next older version, zero at the end; free
// versions are linked there, too (see freeLists). The top bits of the length are flags. A skip link
// begins at the next word.
const (
	versionOlderOffset = 8
	versionLenOffset   = 12
	versionHeaderBytes = 16

	versionSync   = 1 << 31 // written by a SYNC commit: a reader may have to wait until it is durable
	versionSkips  = 1 << 30 // has a skip link
	versionFlags  = versionSync | versionSkips
	valueBytesMax = 1<<30 - 1
)

// Version is one version of a key. Value aliases the table's memory, or is nil for a tombstone.
type Version struct {
	Epoch keys.Epoch
	Kind  keys.Kind
	Sync  bool // written by a SYNC commit
	Value []byte
}

func nodeWords(keyBytes int) uint32 { return uint32(nodeKeyOffset+keyBytes+wordBytes-1) / wordBytes }

func writeNode(base unsafe.Pointer, off uint32, key []byte, newest uint32) {
	p := unsafe.Add(base, uintptr(off)*wordBytes)
	*(*uint64)(p) = pack(1, newest)
	*(*uint64)(unsafe.Add(p, nodeBoundWord*wordBytes)) = 0
	*(*uint32)(unsafe.Add(p, nodeLenOffset)) = uint32(len(key))
	copy(unsafe.Slice((*byte)(unsafe.Add(p, nodeKeyOffset)), len(key)), key)
}

// nodeKey is the node's key. It aliases the arena and is capped, so that an append copies it.
func nodeKey(base unsafe.Pointer, off uint32) []byte {
	p := unsafe.Add(base, uintptr(off)*wordBytes)
	n := *(*uint32)(unsafe.Add(p, nodeLenOffset))
	return unsafe.Slice((*byte)(unsafe.Add(p, nodeKeyOffset)), n)
}

func compareNode(base unsafe.Pointer, off uint32, key []byte) int {
	return bytes.Compare(nodeKey(base, off), key)
}

func nodeHasKey(base unsafe.Pointer, off uint32, key []byte) bool {
	return string(nodeKey(base, off)) == string(key)
}

// flagsOf are the flags of a version in a chain that it makes so long.
func flagsOf(sync bool, length uint32) (flags uint32) {
	if sync {
		flags |= versionSync
	}
	if skipsAt(length) {
		flags |= versionSkips
	}
	return flags
}

// writeVersion writes a version whose value is value and then rest.
func writeVersion(base unsafe.Pointer, off uint32, t keys.Trailer, flags uint32, value, rest []byte) {
	p := unsafe.Add(base, uintptr(off)*wordBytes)
	*(*keys.Trailer)(p) = t
	setOlder(base, off, 0)
	*(*uint32)(unsafe.Add(p, versionLenOffset)) = uint32(len(value)+len(rest)) | flags
	if flags&versionSkips != 0 {
		epoch, target := skipWords(base, off)
		epoch.Store(0)
		target.Store(0)
	}
	at := unsafe.Slice((*byte)(unsafe.Add(p, versionHeaderBytes)), len(value)+len(rest))
	copy(at, value)
	if len(rest) > 0 {
		copy(at[len(value):], rest)
	}
}

func versionTrailer(base unsafe.Pointer, off uint32) keys.Trailer {
	return *(*keys.Trailer)(unsafe.Add(base, uintptr(off)*wordBytes))
}

// versionOlder is the link to the next older version. It is atomic also in free versions, where a
// goroutine that loses a free list's CAS may still read it.
func versionOlder(base unsafe.Pointer, off uint32) *atomic.Uint32 {
	return (*atomic.Uint32)(unsafe.Add(base, uintptr(off)*wordBytes+versionOlderOffset))
}

// versionLength is the length of the value with the flags.
func versionLength(base unsafe.Pointer, off uint32) uint32 {
	return *(*uint32)(unsafe.Add(base, uintptr(off)*wordBytes+versionLenOffset))
}

func versionValueLen(base unsafe.Pointer, off uint32) int {
	return int(versionLength(base, off) &^ versionFlags)
}

// newestAt walks the chain of node to the newest version that is <= at, and returns its offset, or
// zero.
func newestAt(base unsafe.Pointer, node uint32, at keys.Epoch) uint32 {
	v := offsetIn(word64(base, node).Load())
	for v != 0 && versionTrailer(base, v).Epoch() > at {
		if hasSkip(base, v) {
			if older := skipPast(base, v, at); older != 0 {
				v = older
				continue
			}
		}
		v = versionOlder(base, v).Load()
	}
	return v
}

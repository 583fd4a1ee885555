//go:build !race

package memtable

import "unsafe"

// backing is the memory under an arena.
type backing = mapping

// watched says that the race detector may see the arena.
const watched = false

func reserve(bytes uint64, huge bool) (backing, unsafe.Pointer, error) {
	m, err := reserveMapping(bytes, huge)
	return m, m.base, err
}

//go:build amd64 || arm64

package memtable

import "unsafe"

// prefetch asks for count cache lines from each of the first n addresses on. It does not wait for them, and
// an address may be any number. Loads, which Go code could do, would wait: no later instruction completes
// before them, and a processor has only so many unfinished ones. count must not be zero.
//
//go:noescape
func prefetch(lines *[windowOps]unsafe.Pointer, n, count int)

//go:build !race

package memtable

import "unsafe"

// setOlder links a version that nobody has been shown yet, or that is free. The compare-and-swap that shows it comes after, and on amd64
// plain stores keep their order; an atomic one would be a locked exchange, of which an overwrite had three.
func setOlder(base unsafe.Pointer, off, older uint32) {
	*(*uint32)(unsafe.Add(base, uintptr(off)*wordBytes+versionOlderOffset)) = older
}

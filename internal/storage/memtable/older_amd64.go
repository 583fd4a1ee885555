//go:build !race

package memtable

import "unsafe"

// setOlder links a version that is free or not published yet. The compare-and-swap that publishes
// it comes after, and on amd64 plain stores keep their order; an atomic store would be a locked
// exchange, of which an overwrite had three.
func setOlder(base unsafe.Pointer, off, older uint32) {
	*(*uint32)(unsafe.Add(base, uintptr(off)*wordBytes+versionOlderOffset)) = older
}

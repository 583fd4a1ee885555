//go:build !amd64 || race

package memtable

import "unsafe"

// setOlder links a version that nobody has been shown yet, or that is free.
func setOlder(base unsafe.Pointer, off, older uint32) { versionOlder(base, off).Store(older) }

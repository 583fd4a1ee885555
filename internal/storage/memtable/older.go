//go:build !amd64 || race

package memtable

import "unsafe"

// setOlder links a version that is free or not published yet.
func setOlder(base unsafe.Pointer, off, older uint32) { versionOlder(base, off).Store(older) }

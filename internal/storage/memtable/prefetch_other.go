//go:build !amd64 && !arm64

package memtable

import "unsafe"

// prefetch does nothing where the processor's instruction for it is not known.
func prefetch(*[windowOps]unsafe.Pointer, int, int) {}

//go:build !race

package cache

// backing is the memory of frames, usage counts and tables.
type backing = mapping

func reserve(bytes int64) (backing, error) { return reserveMapping(bytes) }

// reservation is the address space that a cache of the given size reserves.
func reservation(bytes int64) int64 { return max(bytes, machineBytes()) }

//go:build amd64 || arm64

package mvcc

// pause tells the processor n times that this is a spin loop. n must not be zero.
func pause(n uint32)

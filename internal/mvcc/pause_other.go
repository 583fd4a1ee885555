//go:build !amd64 && !arm64

package mvcc

// pause burns a little time, where the processor has no hint for spin loops.
func pause(n uint32) {
	for range n * 8 {
	}
}

//go:build !amd64 && !arm64

package page

// prefetch does nothing where there is no instruction for it.
func prefetch(*byte) {}

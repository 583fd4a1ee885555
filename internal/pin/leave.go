//go:build !amd64 || race

package pin

import "sync/atomic"

// clearWord is a store that no earlier access of this goroutine may move behind.
func clearWord(w *atomic.Uint64) { w.Store(0) }

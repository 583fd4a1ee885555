//go:build !amd64 || race

package pin

import "sync/atomic"

// storeWord is a store that no earlier access of this goroutine may move behind.
func storeWord(w *atomic.Uint64, v uint64) { w.Store(v) }

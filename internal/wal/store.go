//go:build !amd64 || race

package wal

import "sync/atomic"

// storeWord is a store that no earlier one of this goroutine may move behind.
func storeWord(w *uint64, v uint64) { atomic.StoreUint64(w, v) }

//go:build !amd64 || race

package wal

import "sync/atomic"

// storeWord stores v. No earlier store of this goroutine may become visible after it.
func storeWord(w *uint64, v uint64) { atomic.StoreUint64(w, v) }

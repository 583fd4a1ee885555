//go:build !race

package wal

// storeWord stores v. No earlier store of this goroutine may become visible after it. On amd64 every plain
// store guarantees that. An atomic store is a locked exchange, with which each commit would wait until its
// whole record has left the processor.
func storeWord(w *uint64, v uint64) { *w = v }

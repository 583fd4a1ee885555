//go:build !race

package wal

// storeWord is a store that no earlier one of this goroutine may move behind. On amd64 every plain store is that, and an atomic one is a
// locked exchange, which would have each commit wait until all of its record has left the processor.
func storeWord(w *uint64, v uint64) { *w = v }

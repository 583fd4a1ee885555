//go:build !race

package cache

import (
	"fmt"
	"runtime/debug"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// TestHotReadsRunOnReadOnlyMemory makes usage counts, table and frames read-only: even a store of
// the value that is already there would fault.
func TestHotReadsRunOnReadOnlyMemory(t *testing.T) {
	const pages = 100
	r := newRig(t, 256)
	for range usageMax + 1 {
		for id := range ID(pages) {
			r.get(t, id+1, Hint(id%ID(hints)))
		}
	}
	shared := []mapping{r.wordMem, r.frameMem, r.table.Load().mem}
	protect := func(how int) {
		for _, m := range shared {
			if err := unix.Mprotect(unsafe.Slice((*byte)(m.start), m.bytes), how); err != nil {
				t.Fatal(err)
			}
		}
	}
	protect(unix.PROT_READ)
	defer protect(unix.PROT_READ | unix.PROT_WRITE)
	if err := faulting(func() {
		for id := range ID(pages) {
			r.get(t, id+1, Hint(id%ID(hints)))
		}
	}); err != nil {
		t.Errorf("a hot read wrote: %v", err)
	}
	if faulting(func() { wordAt(r.words, 0).Add(0) }) == nil {
		t.Error("a write was not noticed: the test shows nothing")
	}
}

// faulting runs f and returns the fault that ended it, if there was one.
func faulting(f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if fault := recover(); fault != nil {
			err = fmt.Errorf("%v", fault)
		}
	}()
	f()
	return nil
}

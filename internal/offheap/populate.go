// Package offheap populates anonymous mappings, so that their page faults happen at a chosen time.
//
// A mapping has no memory until its pages are touched. If a page is touched while the system has no memory, the process
// ends. The commit path must neither fault nor end the process, so its buffers are populated before a commit sequence
// number (epoch) is reserved, and a shortage of memory is an error at that time.
//
// The package does not map or unmap memory: its callers do.
package offheap

import (
	"errors"

	"golang.org/x/sys/unix"
)

const pageBytes = 4 << 10

// Populate gives memory to all pages of b, which is mapped writable, starts at a page and is zero where it was never
// touched. An error means that the system has no memory for all pages; the populated pages stay populated.
func Populate(b []byte) error { return populate(b, unix.Madvise) }

// populate is Populate with the system call, which tests replace.
func populate(b []byte, madvise func([]byte, int) error) error {
	err := madvise(b, unix.MADV_POPULATE_WRITE)
	if !errors.Is(err, unix.EINVAL) {
		return err // touching the pages would end the process
	}
	for i := 0; i < len(b); i += pageBytes { // kernels before 5.14 do not know the advice
		b[i] = 0
	}
	return nil
}

// Package offheap takes the page faults of anonymous mappings at a chosen moment.
//
// A mapping has no memory until its pages are touched, and a page that is touched while the system has no memory ends the process. The
// commit path must meet neither, so its buffers are populated before an epoch is reserved, and a shortage is an error of that moment.
package offheap

import (
	"errors"

	"golang.org/x/sys/unix"
)

const pageBytes = 4 << 10

// Populate takes the page faults of b, which is mapped writable, starts at a page and holds zeros wherever it was never touched. An error
// means that the system has no memory for all of it; what was populated stays.
func Populate(b []byte) error { return populate(b, unix.Madvise) }

// populate is Populate with the system call, which tests replace.
func populate(b []byte, madvise func([]byte, int) error) error {
	err := madvise(b, unix.MADV_POPULATE_WRITE)
	if !errors.Is(err, unix.EINVAL) {
		return err // to touch the pages all the same would end the process
	}
	for i := 0; i < len(b); i += pageBytes { // kernels before 5.14 do not know the advice
		b[i] = 0
	}
	return nil
}

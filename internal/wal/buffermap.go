package wal

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/epochkv/epochkv/internal/offheap"
)

// mapBuffer maps zero bytes and touches their pages.
func mapBuffer(size int) ([]byte, error) {
	buf, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(buf, unix.MADV_HUGEPAGE) // only advice: the kernel falls back to small pages
	if err := offheap.Populate(buf); err != nil {
		return nil, errors.Join(err, unix.Munmap(buf))
	}
	return buf, nil
}

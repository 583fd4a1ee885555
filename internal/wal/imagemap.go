package wal

import "golang.org/x/sys/unix"

// mapImage maps zero bytes and touches their pages.
func mapImage(size int) ([]byte, error) {
	buf, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(buf, unix.MADV_HUGEPAGE) // advice only: small pages serve where there are no huge ones
	if unix.Madvise(buf, unix.MADV_POPULATE_WRITE) != nil {
		for i := 0; i < len(buf); i += pageSize { // kernels before 5.14 do not know the advice
			buf[i] = 0
		}
	}
	return buf, nil
}

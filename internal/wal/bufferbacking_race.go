//go:build race

package wal

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// heapBufferBytesMax bounds the segment buffers that race builds keep on the Go heap; larger ones are mapped
// as in other builds.
const heapBufferBytesMax = 16 << 20

// reserveBuffer takes small buffers from the heap, because the race detector does not see mappings. It
// allocates words, because records begin at multiples of eight.
func reserveBuffer(size int) ([]byte, error) {
	if size > heapBufferBytesMax {
		return mapBuffer(size)
	}
	words := make([]uint64, size/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(words))), size), nil
}

func releaseBuffer(buf []byte) error {
	if len(buf) > heapBufferBytesMax {
		return unix.Munmap(buf)
	}
	return nil
}

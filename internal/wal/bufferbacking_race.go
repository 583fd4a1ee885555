//go:build race

package wal

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// heapImageBytesMax bounds the images that race builds keep on the Go heap; larger ones are mapped as ever.
const heapBufferBytesMax = 16 << 20

// reserveImage takes small images from the heap: the race detector is blind to mappings. Words, because records begin at multiples of eight.
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

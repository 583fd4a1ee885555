package vfs

import (
	"errors"
	"fmt"
	"syscall"
	"unsafe"
)

// DirectAlignment is the alignment of addresses, offsets and lengths of direct I/O. Devices with 512-byte logical blocks
// accept less; all common devices accept this.
const DirectAlignment = 4096

// AlignedBuffer is a zeroed buffer of size bytes with an address that is aligned for direct I/O. It is ordinary
// garbage-collected memory; a cache with frames off the heap maps them itself, and a mapping is always aligned.
func AlignedBuffer(size int) []byte {
	buf := make([]byte, size+DirectAlignment)
	address := uintptr(unsafe.Pointer(unsafe.SliceData(buf)))
	skip := int(-address & (DirectAlignment - 1))
	return buf[skip : skip+size : skip+size]
}

// zeroFillChunk is large enough that the writes run at the device's speed and small enough not to matter in memory. Other syncs of
// the device wait for what was written since the last one, so PreallocateZeroed syncs after each chunk.
const zeroFillChunk = 1 << 20

// errAwaited ends the writing of zeros.
var errAwaited = errors.New("vfs: the file is awaited")

// PreallocateZeroed allocates [0, size) of a new file, writes zeros to it and syncs. It is for files that are later
// overwritten in small pieces, each followed by a sync. Preallocate alone leaves unwritten extents, and after the first
// write to a block of them the next sync commits to the file system's journal. Measured on ext4, one write + fdatasync
// each, growing file / Preallocate / PreallocateZeroed: 256 B pieces 5.0k / 7.4k / 7.3k syncs per second, 4 KiB
// 3.2k / 4.2k / 5.4k, 16 KiB 3.2k / 3.7k / 5.1k. It costs the time to write 64 MiB, about 45 ms, and a sync for each chunk.
// (FALLOC_FL_WRITE_ZEROES would do it in the device; ext4 on virtio returns EOPNOTSUPP.)
//
// Once awaited, which may be nil, returns true, the rest is only allocated, if the file system can do that.
func PreallocateZeroed(f File, size int64, awaited func() bool) error {
	old, err := f.Size()
	if err != nil {
		return err
	}
	if old != 0 {
		return pathError(OpPreallocate, f.Name(), fmt.Errorf("file has %d bytes; only an empty file may be zeroed", old))
	}
	allocated := f.Preallocate(size)
	if allocated != nil && !errors.Is(allocated, syscall.EOPNOTSUPP) {
		return allocated
	}
	err = writeZeros(f, 0, size, func() error {
		if err := f.SyncData(); err != nil || allocated != nil || awaited == nil || !awaited() {
			return err
		}
		return errAwaited
	})
	if err != nil && !errors.Is(err, errAwaited) {
		return err
	}
	return f.Sync()
}

// Preallocate is f.Preallocate, but on a file system that cannot allocate without writing it extends the file by writing
// zeros. After an error it restores the old length of the file if the file system allows it.
func Preallocate(f File, size int64) error {
	err := f.Preallocate(size)
	if !errors.Is(err, syscall.EOPNOTSUPP) {
		return err
	}
	old, err := f.Size()
	if err != nil {
		return err
	}
	if err := writeZeros(f, old, size, nil); err != nil {
		return errors.Join(err, f.Truncate(old))
	}
	return nil
}

// writeZeros writes zeros over [from, to), and calls sync, unless it is nil, after each chunk.
func writeZeros(f File, from, to int64, sync func() error) error {
	if from >= to {
		return nil
	}
	zeros := AlignedBuffer(int(min(to-from, zeroFillChunk)))
	for off := from; off < to; off += zeroFillChunk {
		if _, err := f.WriteAt(zeros[:min(to-off, zeroFillChunk)], off); err != nil {
			return err
		}
		if sync == nil {
			continue
		}
		if err := sync(); err != nil {
			return err
		}
	}
	return nil
}

package vfs

import (
	"errors"

	"golang.org/x/sys/unix"
)

// fallocate allocates a range of a file, which becomes as long as that if it is shorter.
func fallocate(fd int, off, length int64) error { return unix.Fallocate(fd, 0, off, length) }

// allocate allocates what a file lacks of [0, size), with a call for each range. Some file systems, XFS and ZFS among them, want as much free space
// as a range is long, whatever is allocated of it, and keep it from others meanwhile: a file that is larger than the rest of the disk
// could not grow if all of it were allocated again.
func allocate(fd int, size int64, call func(fd int, off, length int64) error) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	const blockBytes = 512 // of Stat_t.Blocks, which may have some that are not of the contents
	if end := min(st.Size, size); st.Blocks*blockBytes < end {
		if err := allocateHoles(fd, end, call); err != nil {
			return err
		}
	}
	if size <= st.Size {
		return nil
	}
	return call(fd, st.Size, size-st.Size)
}

// allocateHoles allocates the holes before an offset.
func allocateHoles(fd int, end int64, call func(fd int, off, length int64) error) error {
	for off := int64(0); off < end; {
		hole, err := unix.Seek(fd, off, unix.SEEK_HOLE)
		if err != nil || hole >= end {
			return err
		}
		off, err = unix.Seek(fd, hole, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // there is nothing but the hole
			off, err = end, nil
		}
		if off = min(off, end); err == nil && off > hole { // otherwise a writer has filled it meanwhile
			err = call(fd, hole, off-hole)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

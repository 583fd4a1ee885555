package vfs

import (
	"errors"
	"slices"

	"golang.org/x/sys/unix"
)

// fallocate allocates a range of a file, which becomes as long as that if it is shorter.
func fallocate(fd int, off, length int64) error { return unix.Fallocate(fd, 0, off, length) }

// allocate allocates [0, size) of a file with a call for a range. Some file systems, XFS and ZFS among them, want as much free space as the range is
// long, whatever is allocated of it: a file that is larger than the rest of the disk could not grow there. So if the space does not
// suffice for the range, only what the file lacks is allocated.
func allocate(fd int, size int64, call func(fd int, off, length int64) error) error {
	err := call(fd, 0, size)
	if !slices.Contains(fullErrnos, err) {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	const blockBytes = 512 // of Stat_t.Blocks
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

// fullErrnos are the errors of a full device, or of a quota that is used up.
var fullErrnos = []error{unix.ENOSPC, unix.EDQUOT}

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
		if off = min(off, end); err == nil {
			err = call(fd, hole, off-hole)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

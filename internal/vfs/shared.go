package vfs

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// SharesBlocks reports whether a file is known to share blocks with another one: with a copy of it, which copies nothing on XFS and Btrfs, or with a
// snapshot. A write there needs space, although the file has the blocks.
func SharesBlocks(f File) bool {
	s, ok := f.(interface{ SharesBlocks() bool })
	return ok && s.SharesBlocks()
}

// The kernel's interface, from linux/fiemap.h.
const (
	fiemapCall   = 0xC020660B // FS_IOC_FIEMAP
	extentLast   = 1 << 0     // FIEMAP_EXTENT_LAST
	extentShared = 1 << 13    // FIEMAP_EXTENT_SHARED
)

// extentMap is struct fiemap with room for some extents.
type extentMap struct {
	start, length                   uint64
	flags, mapped, count, reserved0 uint32
	extents                         [64]extent
}

// extent is struct fiemap_extent.
type extent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

var _ [56]byte = [unsafe.Sizeof(extent{})]byte{}

// SharesBlocks is false where the file system does not tell.
func (f *osFile) SharesBlocks() (shares bool) {
	_ = f.control(OpSize, func(fd int) error {
		m := extentMap{}
		for last := false; !last; {
			m.length, m.mapped, m.count = ^uint64(0)-m.start, 0, uint32(len(m.extents))
			_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), fiemapCall, uintptr(unsafe.Pointer(&m)))
			if errno != 0 {
				return errno
			}
			if m.mapped == 0 {
				return nil
			}
			before := m.start
			for _, e := range m.extents[:min(int(m.mapped), len(m.extents))] {
				shares, last = shares || e.flags&extentShared != 0, e.flags&extentLast != 0
				m.start = e.logical + e.length
			}
			last = last || m.start <= before
		}
		return nil
	})
	return shares
}

package vfs

import "golang.org/x/sys/unix"

// noCopyFlag is FS_NOCOW_FL: what is written replaces what was there, and does not go to new blocks.
const noCopyFlag = 0x00800000

// writeInPlace makes a new file one that is written in place on Btrfs, which otherwise needs space for each write, also where the file has blocks: on a
// full disk, the next record would end the log. Pages and records have checksums of their own. Where the flag is refused, the file is as it is.
func writeInPlace(fd int) {
	var st unix.Statfs_t
	if unix.Fstatfs(fd, &st) != nil || st.Type != unix.BTRFS_SUPER_MAGIC {
		return
	}
	if flags, err := unix.IoctlGetUint32(fd, unix.FS_IOC_GETFLAGS); err == nil {
		_ = unix.IoctlSetPointerInt(fd, unix.FS_IOC_SETFLAGS, int(flags|noCopyFlag))
	}
}

package vfs

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// What root creates in a directory of another account belongs to that account, as the directory does. A server that runs without
// privileges must be able to open what an offline tool, which an operator runs as root, has left in its data directory.

// ownerOf is the account of the directory in which a name is, if root creates the name and the account is another one.
func ownerOf(name string) (uid, gid int, other bool) {
	if os.Geteuid() != 0 {
		return 0, 0, false
	}
	var dir unix.Stat_t
	if err := unix.Stat(filepath.Dir(name), &dir); err != nil {
		return 0, 0, false
	}
	return int(dir.Uid), int(dir.Gid), dir.Uid != 0
}

// giveFile gives a file that was just created to the account of its directory.
func giveFile(name string, fd int) error {
	uid, gid, other := ownerOf(name)
	if !other {
		return nil
	}
	return given(retry(func() error { return unix.Fchown(fd, uid, gid) }))
}

// giveDir is giveFile for a directory. It follows no link that another program has put in its place.
func giveDir(name string) error {
	uid, gid, other := ownerOf(name)
	if !other {
		return nil
	}
	return given(os.Lchown(name, uid, gid))
}

// given ignores that root may be forbidden to change owners, as in some containers and on some network file systems.
func given(err error) error {
	if errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}

// createLock opens a lock file, and creates it first if it does not exist. Only a file that it has created changes its owner: an
// existing name may be a link to anything.
func createLock(name string) (int, error) {
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_CLOEXEC
	fd, err := openRetry(name, flags|unix.O_EXCL)
	if errors.Is(err, unix.EEXIST) {
		return openRetry(name, flags)
	}
	if err != nil {
		return fd, err
	}
	if err := giveFile(name, fd); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

package vfs

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// What root creates in a directory of another account belongs to that account, as the directory does. A server that runs without
// privileges must be able to open what an offline tool, which an operator runs as root, has left in its data directory.

// ownerOf is the account of a directory, if root creates something for it and the account is another one.
func ownerOf(dir string) (uid, gid int, other bool) {
	if os.Geteuid() != 0 {
		return 0, 0, false
	}
	var stat unix.Stat_t
	if err := unix.Stat(dir, &stat); err != nil {
		return 0, 0, false
	}
	return int(stat.Uid), int(stat.Gid), stat.Uid != 0
}

// giveFile gives a file that was just created to the account of its directory.
func giveFile(name string, fd int) error {
	uid, gid, other := ownerOf(filepath.Dir(name))
	if !other {
		return nil
	}
	return given(retry(func() error { return unix.Fchown(fd, uid, gid) }))
}

// MkdirLike makes a directory that does not exist. If root makes it, it belongs to the account of another one, which it is to replace.
func MkdirLike(dir, like string) error {
	if err := os.Mkdir(dir, dirMode); err != nil {
		return err
	}
	return GiveLike(dir, like)
}

// GiveLike gives what was just created to the account of a directory, if root has created it.
func GiveLike(name, dir string) error {
	uid, gid, other := ownerOf(dir)
	if !other {
		return nil
	}
	return given(os.Lchown(name, uid, gid))
}

// giveDir is giveFile for a directory. It follows no link that another program has put in its place.
func giveDir(name string) error { return GiveLike(name, filepath.Dir(name)) }

// given ignores that root may be forbidden to change owners, as in some containers and on some network file systems.
func given(err error) error {
	if errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}

// createLock opens a lock file, and creates it first if it does not exist. Only a file that it has created changes its owner: an
// existing name may be a link to anything. On a file system that can only be read, which is what a damaged one often becomes, the file as it
// is can be locked, or without one its directory.
func createLock(name string, open func(name string, flags int) (int, error)) (int, error) {
	const flags = unix.O_RDWR | unix.O_CREAT | unix.O_CLOEXEC
	fd, err := open(name, flags|unix.O_EXCL)
	created := err == nil
	if errors.Is(err, unix.EEXIST) {
		fd, err = open(name, flags)
	}
	if errors.Is(err, unix.EROFS) {
		if fd, err = open(name, unix.O_RDONLY|unix.O_CLOEXEC); errors.Is(err, unix.ENOENT) {
			fd, err = open(filepath.Dir(name), unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
		}
	}
	if err != nil || !created {
		return fd, err
	}
	if err := giveFile(name, fd); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

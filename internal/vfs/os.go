package vfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// OS is the real file system; see NewOS and OpenOS. An OS and its Direct variant share the rings and threads for
// batches, so a process needs one OS.
type OS struct {
	batches *batcher
	direct  bool
}

var _ FS = (*OS)(nil)

// NewOS returns the operating system's files with batches over pread and pwrite. There is nothing to close.
func NewOS() *OS {
	return &OS{batches: &batcher{}}
}

// OpenOS returns the operating system's files with the given method for batches. Close it after its files.
func OpenOS(method IO) (*OS, error) {
	o := NewOS()
	if method == IOPread {
		return o, nil
	}
	rings, err := newRingPool()
	if err != nil && method == IOUring {
		return nil, fmt.Errorf("vfs: io_uring is not available: %w", err)
	}
	o.batches.rings = rings
	return o, nil
}

// IO is the method for batches: IOUring or IOPread.
func (o *OS) IO() IO {
	if o.batches.rings == nil {
		return IOPread
	}
	return IOUring
}

// Stats counts the operations of this OS and its Direct variant.
func (o *OS) Stats() Stats { return o.batches.stats() }

// Close waits for running batches and closes the rings of this OS and its Direct variant. Open files continue to work,
// with pread and pwrite.
func (o *OS) Close() error {
	if o.batches.rings == nil {
		return nil
	}
	return o.batches.rings.close()
}

// Direct is the same file system without the kernel's page cache (O_DIRECT): every buffer address, offset and length of
// its files must be a multiple of DirectAlignment; see AlignedBuffer. Open fails on a file system that does not support
// it.
func (o *OS) Direct() *OS {
	return &OS{batches: o.batches, direct: true}
}

// Open opens or creates a file.
func (o *OS) Open(name string, mode Mode) (File, error) {
	op, flags := OpOpen, unix.O_CLOEXEC
	switch mode {
	case ReadOnly:
		flags |= unix.O_RDONLY
	case ReadWrite:
		flags |= unix.O_RDWR
	case Create:
		op, flags = OpCreate, flags|unix.O_RDWR|unix.O_CREAT|unix.O_EXCL
	}
	if o.direct {
		flags |= unix.O_DIRECT
	}
	fd, err := openRetry(name, flags)
	if err == nil && mode == Create {
		writeInPlace(fd)
		if err = giveFile(name, fd); err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	if err != nil {
		return nil, pathError(op, name, err)
	}
	return newOSFile(name, fd, o), nil
}

// Permissions of new files and directories: only the account of the store may read them, whatever the umask permits.
const (
	fileMode = 0o600
	dirMode  = 0o700
)

// openRetry is open(2); file systems with interruptible calls (FUSE, NFS) need the loop.
func openRetry(name string, flags int) (int, error) {
	for {
		fd, err := unix.Open(name, flags, fileMode)
		if err != unix.EINTR {
			return fd, err
		}
	}
}

// Remove removes a file or an empty directory.
func (o *OS) Remove(name string) error {
	return pathError(OpRemove, name, os.Remove(name))
}

// Rename moves a file and replaces a file with the new name.
func (o *OS) Rename(from, to string) error {
	var link *os.LinkError
	err := os.Rename(from, to)
	if errors.As(err, &link) {
		err = link.Err
	}
	return pathError(OpRename, from+" -> "+to, err)
}

// MkdirAll makes dir and its missing parents, durably.
func (o *OS) MkdirAll(dir string) error {
	dir = filepath.Clean(dir)
	if info, err := os.Stat(dir); err == nil && info.IsDir() {
		return nil
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := o.MkdirAll(parent); err != nil {
			return err
		}
	}
	err := os.Mkdir(dir, dirMode)
	if err == nil {
		err = giveDir(dir)
	}
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return pathError(OpMkdir, dir, err)
	}
	return o.SyncDir(parent)
}

// List returns the names in dir, sorted.
func (o *OS) List(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, pathError(OpList, dir, err)
	}
	names := make([]string, len(entries))
	for i, entry := range entries {
		names[i] = entry.Name()
	}
	return names, nil
}

// Size is the named file's length.
func (o *OS) Size(name string) (int64, error) {
	info, err := os.Stat(name)
	if err != nil {
		return 0, pathError(OpSize, name, err)
	}
	return info.Size(), nil
}

// SyncDir makes the names in dir durable.
func (o *OS) SyncDir(dir string) error {
	fd, err := openRetry(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC)
	if err != nil {
		return pathError(OpSyncDir, dir, err)
	}
	err = retry(func() error { return unix.Fsync(fd) })
	return pathError(OpSyncDir, dir, errors.Join(err, unix.Close(fd)))
}

// Lock takes the lock file. The lock (flock) belongs to the open file, so that a second Lock fails in this process as
// in any other, and the lock of a killed process ends. The file itself stays: removing it would race with the next
// owner.
func (o *OS) Lock(name string) (io.Closer, error) {
	fd, err := createLock(name, openRetry)
	if err != nil {
		return nil, pathError(OpLock, name, err)
	}
	err = retry(func() error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if err != nil {
		if err == unix.EWOULDBLOCK {
			err = &LockedError{PID: readOwner(fd)}
		}
		return nil, pathError(OpLock, name, errors.Join(err, unix.Close(fd)))
	}
	writeOwner(fd)
	return newOSFile(name, fd, o), nil
}

// ownerBytesMax is more than the length of a process id.
const ownerBytesMax = 32

// writeOwner writes the id of this process into its lock file, for the error message of the next process. It may fail,
// for example on a full disk: the lock does not need it.
func writeOwner(fd int) {
	if unix.Ftruncate(fd, 0) == nil {
		_, _ = unix.Pwrite(fd, strconv.AppendInt(nil, int64(os.Getpid()), 10), 0)
	}
}

// readOwner is the id of the process that holds the lock; zero if it is not known.
func readOwner(fd int) int {
	text := make([]byte, ownerBytesMax)
	n, err := unix.Pread(fd, text, 0)
	if err != nil || n < 0 {
		return 0
	}
	pid, err := strconv.Atoi(string(text[:n]))
	if err != nil {
		return 0
	}
	return pid
}

// Free is the space that an unprivileged writer to dir may use.
func (o *OS) Free(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := retry(func() error { return unix.Statfs(dir, &st) }); err != nil {
		return 0, pathError(OpFree, dir, err)
	}
	return int64(st.Bavail) * st.Frsize, nil
}

// retry repeats a system call that a signal interrupted. It is for calls that may be repeated without a check.
func retry(call func() error) error {
	for {
		if err := call(); err != unix.EINTR {
			return err
		}
	}
}

package vfs

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"syscall"
)

// noSpaceError is an out-of-space errno that matches ErrNoSpace, and also the errno itself.
type noSpaceError struct{ errno syscall.Errno }

func (e noSpaceError) Error() string        { return e.errno.Error() }
func (e noSpaceError) Unwrap() error        { return e.errno }
func (e noSpaceError) Is(target error) bool { return target == ErrNoSpace }

// deviceError is an errno of a block that the device cannot read. It matches ErrDevice, and also the errno itself.
type deviceError struct{ errno syscall.Errno }

func (e deviceError) Error() string        { return e.errno.Error() }
func (e deviceError) Unwrap() error        { return e.errno }
func (e deviceError) Is(target error) bool { return target == ErrDevice }

// deviceErrnos are the errors of a read without the page cache, which returns what the block layer says: that the medium is damaged, that the
// device refuses the block, and that its checksum is wrong. With the page cache all of them are EIO.
var deviceErrnos = []syscall.Errno{syscall.ENODATA, syscall.EREMOTEIO, syscall.EILSEQ}

// noSpaceErrnos are the errors of a device that is full, of a quota that is used up, and of a file that is as long as the file system allows.
var noSpaceErrnos = []syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG}

// pathError adds the file and the operation to an error, and makes the errors of a full device match ErrNoSpace, and those of a
// block that cannot be read ErrDevice. It returns nil for nil. An error that already names a file keeps that name.
func pathError(op Op, name string, err error) error {
	if err == nil {
		return nil
	}
	var errno syscall.Errno
	switch known := errors.As(err, &errno); {
	case known && slices.Contains(noSpaceErrnos, errno):
		err = noSpaceError{errno}
	case known && op == OpRead && slices.Contains(deviceErrnos, errno):
		err = deviceError{errno}
	}
	var named *fs.PathError
	if errors.As(err, &named) {
		return err
	}
	return &fs.PathError{Op: op.String(), Path: name, Err: err}
}

// Exhausted reports whether an operation failed because the process or the machine is out of descriptors or memory, and
// not because of its file.
func Exhausted(err error) bool {
	return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM)
}

// LockedError is ErrLocked with the process that holds the lock.
type LockedError struct{ PID int } // zero: not known

func (e *LockedError) Error() string {
	if e.PID == 0 {
		return ErrLocked.Error()
	}
	return fmt.Sprintf("vfs: locked by process %d", e.PID)
}

// Is makes it match ErrLocked.
func (e *LockedError) Is(target error) bool { return target == ErrLocked }

// firstError is the result of a batch: the first failed request's error.
func firstError(reqs []Request) error {
	for i := range reqs {
		if reqs[i].Err != nil {
			return reqs[i].Err
		}
	}
	return nil
}

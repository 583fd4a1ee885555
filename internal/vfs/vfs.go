// Package vfs is the one way to a file: everything in the engine that touches storage goes through FS and File.
//
// Implementations: OS (the real one), Mem (in memory, with a crash that keeps only what file and directory syncs
// promised), and Faulty (wraps another and injects errors).
//
// The OS does single operations and syncs as plain system calls. Batches go where they were measured to be fastest:
//
//	ReadAt     ─► pread; while others read the same file, together with them, as ReadBatch
//	ReadBatch  ─► neighbours: preadv on the caller's thread; others: a ring (io_uring), or without one a few threads of preads
//	WriteBatch ─► buffered, or long runs: pwritev on the caller's thread; scattered direct pages: as ReadBatch
//
// Promises a caller may rely on, and nothing else:
//   - bytes written are durable after a later Sync or SyncData of the same file returned nil;
//   - a created, renamed or removed name is durable after a later SyncDir of its directory returned nil;
//   - an unsynced write may survive a crash whole, in part (torn at 512-byte sectors), or not at all, and later
//     writes may survive where earlier ones did not;
//   - after a Sync or a write failed, what is on the device is unknown: callers stop, they do not retry.
//
// Names are slash-separated paths. A File may be used by many goroutines at once.
package vfs

import (
	"errors"
	"io"
	"syscall"
)

// Errors that callers test with errors.Is. Others come from the operating system, wrapped with the file's name.
var (
	// ErrLocked means another process (or another holder in this one) has the lock file.
	ErrLocked = errors.New("vfs: locked by another process")
	// ErrNoSpace means the device or quota is full. OS errors ENOSPC and EDQUOT match it.
	ErrNoSpace = errors.New("vfs: no space left on device")
	// ErrDevice is what the kernel says of a place that the device cannot read or write.
	ErrDevice error = syscall.EIO
	// ErrCrashed is what every operation of a crashed in-memory file system returns.
	ErrCrashed = errors.New("vfs: file system crashed")
)

// Mode says how Open treats the file.
type Mode uint8

// Open modes.
const (
	// ReadOnly opens an existing file for reading.
	ReadOnly Mode = iota
	// ReadWrite opens an existing file for reading and writing.
	ReadWrite
	// Create makes a new file for reading and writing; an existing one is an error (fs.ErrExist).
	Create
)

// FS is a file system. Errors match fs.ErrNotExist and fs.ErrExist where they apply.
type FS interface {
	Open(name string, mode Mode) (File, error)
	Remove(name string) error
	Rename(from, to string) error
	// MkdirAll makes dir and what is missing above it; the new directories are durable when it returns.
	MkdirAll(dir string) error
	// List returns the names (without directory) in dir, sorted.
	List(dir string) ([]string, error)
	// Size is the length of the named file in bytes.
	Size(name string) (int64, error)
	SyncDir(dir string) error
	// Lock takes an exclusive lock on the named file, creating it if need be; Close of the result releases it.
	Lock(name string) (io.Closer, error)
	// Free is the number of bytes that a writer to dir may still use.
	Free(dir string) (int64, error)
}

// File is an open file. ReadAt and WriteAt follow io.ReaderAt and io.WriterAt: a short count comes with an error.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Name() string
	Size() (int64, error)
	Truncate(size int64) error
	// Preallocate makes [0, size) allocated on the device, extending the file with zero bytes if it is shorter. A log
	// wants more: see PreallocateZeroed.
	Preallocate(size int64) error
	// Sync makes contents and metadata durable (fsync).
	Sync() error
	// SyncData makes contents durable, and of the metadata what reading them back needs (fdatasync).
	SyncData() error
	// ReadBatch reads every request, in any order, and returns when all have completed. Each request's Err is set;
	// the result is the first of them in request order.
	ReadBatch(reqs []Request) error
	// WriteBatch writes every request, in any order, and returns when all have completed; errors as ReadBatch.
	WriteBatch(reqs []Request) error
}

// Request is one read or write of a batch. Err is what ReadAt or WriteAt would have returned: nil only if all of Buf was
// transferred, io.EOF if the file ended first.
type Request struct {
	Buf    []byte
	Offset int64
	Err    error
}

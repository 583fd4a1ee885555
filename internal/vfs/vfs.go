// Package vfs is the only access to files: every part of the engine that uses storage does so through FS and File.
//
// Implementations: OS (the real file system), Mem (in memory, with a crash that keeps only what file and directory
// syncs promised), and Faulty (wraps another file system and injects errors).
//
//	coalesced read  a single read that is done together with other single reads of the same file
//	run             requests of a batch whose ranges in the file are neighbours
//	ring            one io_uring with the batch that it runs
//	survival        which unsynced changes remain after a crash of Mem
//
// OS does single operations and syncs as plain system calls. A batch takes the path that was measured to be fastest:
//
//	ReadAt     ─► pread; while other goroutines read the same file, coalesced with their reads, as ReadBatch
//	ReadBatch  ─► neighbours: preadv on the caller's thread; others: a ring, or without one preads in a few threads
//	WriteBatch ─► buffered, or long runs: pwritev on the caller's thread; scattered direct pages: as ReadBatch
//
// A caller may rely on these promises, and on nothing else:
//   - bytes written are durable after a later Sync or SyncData of the same file returned nil;
//   - a created, renamed or removed name is durable after a later SyncDir of its directory returned nil;
//   - an unsynced write may survive a crash whole, in part (torn at 512-byte sectors), or not at all, and later
//     writes may survive where earlier ones did not;
//   - after a failed Sync or write, the contents of the device are unknown: callers stop, they do not retry.
//
// Names are slash-separated paths. Many goroutines may use a File at once. The package does not know what the files
// contain, does not retry failed operations, and does not cache.
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
	// ErrNoSpace means the device or quota is full, or the file as long as the file system allows. OS errors ENOSPC, EDQUOT and EFBIG match it.
	ErrNoSpace = errors.New("vfs: no space left on device")
	// ErrDevice is the kernel's error for a block that the device cannot read or write. What a read without the page cache returns for one
	// matches it, too.
	ErrDevice error = syscall.EIO
	// ErrCrashed is the error of every operation of a crashed in-memory file system.
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
	// MkdirAll makes dir and its missing parents; the new directories are durable when it returns.
	MkdirAll(dir string) error
	// List returns the names (without directory) in dir, sorted.
	List(dir string) ([]string, error)
	// Size is the length of the named file in bytes.
	Size(name string) (int64, error)
	SyncDir(dir string) error
	// Lock takes an exclusive lock on the named file, which it creates if necessary; Close of the result releases it.
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
	// needs more: see PreallocateZeroed.
	Preallocate(size int64) error
	// Sync makes contents and metadata durable (fsync).
	Sync() error
	// SyncData makes contents durable, and the metadata that reading them back needs (fdatasync).
	SyncData() error
	// DropCache lets the system forget what it has cached of the contents, and does not have to write. After a sync that failed reads
	// otherwise find, also in later processes, what is not on the device, and what no later sync writes.
	DropCache()
	// ReadBatch reads every request, in any order, and returns when all have completed. Each request's Err is set;
	// the result is the first of them in request order.
	ReadBatch(reqs []Request) error
	// WriteBatch writes every request, in any order, and returns when all have completed; errors as ReadBatch.
	WriteBatch(reqs []Request) error
}

// Request is one read or write of a batch. Err is the error that ReadAt or WriteAt would have returned: nil only if all
// of Buf was transferred, io.EOF if the file ended first.
type Request struct {
	Buf    []byte
	Offset int64
	Err    error
}

package vfs

import (
	"io"
	"io/fs"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// osFile is an open file of the operating system.
//
// Users of the descriptor are counted: an operation that races with Close either runs on the open file or gets
// fs.ErrClosed. It never runs on another file to which the kernel gave the same number, which would be silent damage.
type osFile struct {
	name      string
	fd        int
	fs        *OS
	direct    bool
	coalescer coalescer

	// users is the number of operations in flight, plus closedBit once Close was called. No operation starts after that.
	users   atomic.Int64
	drained chan struct{} // closed by the last user after closedBit was set
}

const closedBit = 1 << 62

var _ File = (*osFile)(nil)

func newOSFile(name string, fd int, o *OS) *osFile {
	return &osFile{name: name, fd: fd, fs: o, direct: o.direct, drained: make(chan struct{})}
}

func (f *osFile) enter() bool {
	for {
		users := f.users.Load()
		if users&closedBit != 0 {
			return false
		}
		if f.users.CompareAndSwap(users, users+1) {
			return true
		}
	}
}

func (f *osFile) leave() {
	if f.users.Add(-1) == closedBit {
		close(f.drained)
	}
}

func (f *osFile) closedError(op Op) error { return pathError(op, f.name, fs.ErrClosed) }

// Close waits for the operations in flight, then closes the descriptor.
func (f *osFile) Close() error {
	for {
		users := f.users.Load()
		if users&closedBit != 0 {
			return f.closedError(OpClose)
		}
		if !f.users.CompareAndSwap(users, users|closedBit) {
			continue
		}
		if users > 0 {
			<-f.drained
		}
		// Never repeated: on Linux the descriptor is gone even when close reports EINTR.
		return pathError(OpClose, f.name, unix.Close(f.fd))
	}
}

func (f *osFile) Name() string { return f.name }

// ReadAt reads until p is full or the file ends.
func (f *osFile) ReadAt(p []byte, off int64) (int, error) {
	if !f.enter() {
		return 0, f.closedError(OpRead)
	}
	n, err := f.readAt(p, off)
	f.leave()
	if err != nil && err != io.EOF {
		err = pathError(OpRead, f.name, err)
	}
	return n, err
}

// readAt reads with a plain call if no other read of the file runs.
func (f *osFile) readAt(p []byte, off int64) (n int, err error) {
	others := f.coalescer.reading.Add(1) > 1
	defer f.coalescer.reading.Add(-1)
	if others && f.fs.batches.rings != nil {
		if f.coalescer.readAt(f, p, off) == nil {
			return len(p), nil
		}
		// A plain call determines how many bytes can be read, and the error.
	}
	start := time.Now()
	n, err = preadFull(f.fd, p, off)
	f.fs.batches.singleReads.Add(1)
	f.fs.batches.watches[PathSingleRead].since(start)
	return n, err
}

// WriteAt writes all of p.
func (f *osFile) WriteAt(p []byte, off int64) (int, error) {
	if !f.enter() {
		return 0, f.closedError(OpWrite)
	}
	n, err := pwriteFull(f.fd, p, off)
	f.leave()
	return n, pathError(OpWrite, f.name, err)
}

// preadFull reads until p is full, the file ends (io.EOF), or an error.
func preadFull(fd int, p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pread(fd, p[done:], off+int64(done))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return done, err
		}
		if n == 0 {
			return done, io.EOF
		}
		done += n
	}
	return done, nil
}

// pwriteFull writes all of p, or returns how many bytes it wrote with the error.
func pwriteFull(fd int, p []byte, off int64) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Pwrite(fd, p[done:], off+int64(done))
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return done, err
		}
		if n == 0 {
			return done, io.ErrShortWrite
		}
		done += n
	}
	return done, nil
}

// control runs a call on the descriptor that is neither read nor write.
func (f *osFile) control(op Op, call func(fd int) error) error {
	if !f.enter() {
		return f.closedError(op)
	}
	err := retry(func() error { return call(f.fd) })
	f.leave()
	return pathError(op, f.name, err)
}

// Size is the file's current length.
func (f *osFile) Size() (int64, error) {
	var st unix.Stat_t
	err := f.control(OpSize, func(fd int) error { return unix.Fstat(fd, &st) })
	return st.Size, err
}

// Truncate sets the length; an added part reads as zero and is not allocated.
func (f *osFile) Truncate(size int64) error {
	return f.control(OpTruncate, func(fd int) error { return unix.Ftruncate(fd, size) })
}

// Preallocate is fallocate: the blocks are reserved and marked unwritten.
func (f *osFile) Preallocate(size int64) error {
	if size <= 0 {
		return nil
	}
	return f.control(OpPreallocate, func(fd int) error { return allocate(fd, size, fallocate) })
}

// Sync is fsync.
func (f *osFile) Sync() error {
	return f.control(OpSync, unix.Fsync)
}

// SyncData is fdatasync. The log calls it most often, so it avoids the closures of control.
func (f *osFile) SyncData() error {
	if !f.enter() {
		return f.closedError(OpSyncData)
	}
	err := unix.Fdatasync(f.fd)
	for err == unix.EINTR {
		err = unix.Fdatasync(f.fd)
	}
	f.leave()
	return pathError(OpSyncData, f.name, err)
}

// DropCache is posix_fadvise. A file system without it reads as before.
func (f *osFile) DropCache() {
	_ = f.control(OpRead, func(fd int) error { return unix.Fadvise(fd, 0, 0, unix.FADV_DONTNEED) })
}

// ReadBatch reads every request.
func (f *osFile) ReadBatch(reqs []Request) error { return f.batch(OpRead, reqs) }

// WriteBatch writes every request.
func (f *osFile) WriteBatch(reqs []Request) error { return f.batch(OpWrite, reqs) }

func (f *osFile) batch(op Op, reqs []Request) error {
	if !f.enter() {
		for i := range reqs {
			reqs[i].Err = f.closedError(op)
		}
		return firstError(reqs)
	}
	f.fs.batches.run(f, op, reqs)
	f.leave()
	return firstError(reqs)
}

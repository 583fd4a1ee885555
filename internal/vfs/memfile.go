package vfs

import (
	"io/fs"
	"syscall"
)

// memFile is a handle on a memNode.
type memFile struct {
	fs       *Mem
	node     *memNode
	name     string
	readOnly bool
	closed   bool // guarded by fs.mu
}

var _ File = (*memFile)(nil)

func (f *memFile) Name() string { return f.name }

// Close closes the handle; it makes nothing durable.
func (f *memFile) Close() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	switch {
	case f.fs.crashed:
		return pathError(OpClose, f.name, ErrCrashed)
	case f.closed:
		return pathError(OpClose, f.name, fs.ErrClosed)
	}
	f.closed = true
	f.node.handles--
	f.fs.releaseLocked(f.node)
	return nil
}

func (f *memFile) observe(op Op, do func() error) error {
	return f.fs.observe(op, f.name, func() error {
		if f.closed {
			return fs.ErrClosed
		}
		return do()
	})
}

func (f *memFile) mutate(op Op, do func() error) error {
	return f.fs.mutate(op, f.name, func() error {
		if f.closed {
			return fs.ErrClosed
		}
		if f.readOnly && op&OpAnySync == 0 {
			return syscall.EBADF
		}
		return do()
	})
}

// ReadAt reads the visible contents, synced or not.
func (f *memFile) ReadAt(p []byte, off int64) (int, error) {
	f.fs.mu.RLock()
	defer f.fs.mu.RUnlock()
	switch {
	case f.fs.crashed:
		return 0, pathError(OpRead, f.name, ErrCrashed)
	case f.closed:
		return 0, pathError(OpRead, f.name, fs.ErrClosed)
	case off < 0:
		return 0, pathError(OpRead, f.name, syscall.EINVAL)
	}
	return f.node.now.readAt(p, off)
}

// WriteAt writes as much of p as the capacity allows.
func (f *memFile) WriteAt(p []byte, off int64) (n int, err error) {
	err = f.mutate(OpWrite, func() error {
		if off < 0 {
			return syscall.EINVAL
		}
		fits := f.fs.reserveLocked(f.node, off, int64(len(p)))
		n = int(fits)
		if n > 0 {
			data := append([]byte(nil), p[:n]...)
			f.apply(contentChange{kind: OpWrite, off: off, data: data})
		}
		if n < len(p) {
			return syscall.ENOSPC
		}
		return nil
	})
	return n, err
}

// reserveLocked is how many bytes at off the capacity lets the node write.
func (m *Mem) reserveLocked(node *memNode, off, length int64) int64 {
	if m.capacity == 0 {
		return length
	}
	free := int(max(0, m.capacity-m.used) / memBlockSize)
	return node.now.fits(off, length, free)
}

// apply makes a change visible and records it until the next sync.
func (f *memFile) apply(change contentChange) {
	node := f.node
	before := node.now.used
	node.now.apply(change)
	f.fs.used += int64(node.now.used-before) * memBlockSize
	node.pending = append(node.pending, change)
}

func (m *memImage) apply(change contentChange) {
	switch change.kind {
	case OpWrite:
		m.write(change.data, change.off)
	case OpTruncate:
		m.truncate(change.size)
	case OpPreallocate:
		m.preallocate(change.size)
	}
}

// Size is the visible length of the file.
func (f *memFile) Size() (size int64, err error) {
	err = f.observe(OpSize, func() error {
		size = f.node.now.size
		return nil
	})
	return size, err
}

// Truncate sets the length; an added part is a hole.
func (f *memFile) Truncate(size int64) error {
	return f.mutate(OpTruncate, func() error {
		if size < 0 {
			return syscall.EINVAL
		}
		f.apply(contentChange{kind: OpTruncate, size: size})
		return nil
	})
}

// Preallocate takes the space for [0, size), all or nothing.
func (f *memFile) Preallocate(size int64) error {
	return f.mutate(OpPreallocate, func() error {
		if size <= 0 {
			return nil
		}
		if f.fs.reserveLocked(f.node, 0, size) < size {
			return syscall.ENOSPC
		}
		f.apply(contentChange{kind: OpPreallocate, size: size})
		return nil
	})
}

// Sync makes the file's contents and length durable.
func (f *memFile) Sync() error { return f.sync(OpSync) }

// SyncData is Sync: reading the contents back needs the length.
func (f *memFile) SyncData() error { return f.sync(OpSyncData) }

func (f *memFile) sync(op Op) error {
	return f.mutate(op, func() error {
		f.node.sync()
		return nil
	})
}

// sync makes the visible image durable. A log syncs a few kilobytes of a large file very often, so sync compares only
// the changed blocks, unless the file shrank or was preallocated.
func (n *memNode) sync() {
	from, to := n.durable, n.now
	resized := false
	for _, change := range n.pending {
		resized = resized || change.kind != OpWrite
	}
	from.truncate(to.size)
	n.recordDirty()
	switch {
	case len(n.discarded) > 0:
		for i := range to.blocks {
			if !n.discarded[i] {
				from.adopt(to, i, i+1)
			}
		}
	case resized:
		from.adopt(to, 0, len(to.blocks))
	default:
		for _, change := range n.pending {
			from.adopt(to, int(change.off/memBlockSize), blocksFor(change.off+int64(len(change.data))))
		}
	}
	from.used = to.used
	n.pending = n.pending[:0]
}

// discardDirty is a sync that fails after the kernel has discarded the dirty pages: see DiscardDirty. Changes of size are
// in the journal, and stay pending.
func (f *memFile) discardDirty() {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	n := f.node
	n.recordDirty()
	var kept []contentChange
	for _, change := range n.pending {
		if change.kind != OpWrite {
			kept = append(kept, change)
			continue
		}
		if n.discarded == nil {
			n.discarded = map[int]bool{}
		}
		for i := int(change.off / memBlockSize); i < blocksFor(change.off+int64(len(change.data))); i++ {
			n.discarded[i] = true
		}
	}
	n.pending = kept
}

// DropCache makes the discarded blocks visible as they are on the disk.
func (f *memFile) DropCache() {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	n := f.node
	n.recordDirty()
	for i := range n.discarded {
		n.now.revert(n.durable, i)
	}
	n.discarded = nil
}

// recordDirty removes from the discarded blocks those that were written again or truncated.
func (n *memNode) recordDirty() {
	if len(n.discarded) == 0 {
		return
	}
	for _, change := range n.pending {
		switch change.kind {
		case OpWrite:
			for i := int(change.off / memBlockSize); i < blocksFor(change.off+int64(len(change.data))); i++ {
				delete(n.discarded, i)
			}
		case OpTruncate:
			for i := range n.discarded {
				if i >= blocksFor(change.size) {
					delete(n.discarded, i)
				}
			}
		}
	}
}

// ReadBatch reads the requests in order.
func (f *memFile) ReadBatch(reqs []Request) error {
	for i := range reqs {
		_, reqs[i].Err = f.ReadAt(reqs[i].Buf, reqs[i].Offset)
	}
	return firstError(reqs)
}

// WriteBatch writes the requests in order; each counts as one mutating operation.
func (f *memFile) WriteBatch(reqs []Request) error {
	for i := range reqs {
		_, reqs[i].Err = f.WriteAt(reqs[i].Buf, reqs[i].Offset)
	}
	return firstError(reqs)
}
